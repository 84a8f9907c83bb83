//! Which keys there are, what they take, and what contradicts what.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use plimsoll_policy::registry::{PRESETS, PolicyOptions, SEARCHES};
use plimsoll_policy::{GivenOptions, POLICIES, Policy, PolicyOption};
use plimsoll_protocol::decision::Mode;

use super::source::{File, Table, Value};
use super::{Config, ConfigError, TcpSettings, TlsSettings, TraceBackend, VmRule, Workflow};

const KIB: u64 = 1 << 10;
const GIB: u64 = 1 << 30;
/// More than any host has.
const SIZE_MAX: u64 = 1 << 50;
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_hours(1);
const WEEK: Duration = Duration::from_hours(7 * 24);
const YEAR: Duration = Duration::from_hours(365 * 24);

/// What several keys together make one setting of, as far as it is read.
struct Draft<'a> {
    config: Config,
    policy: &'static str,
    search: &'static str,
    seed: u64,
    idle_tax: f64,
    from_caches: bool,
    direct_ratio: f64,
    trace_for: Duration,
    keep: bool,
    every: Duration,
    listen: Option<SocketAddr>,
    token_file: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
    tcp_read_only: bool,
    /// Where each key was last set.
    set: BTreeMap<&'static str, Value<'a>>,
}

/// What reads a section.
type Section<'a> = fn(&mut Draft<'a>, &Table<'a>) -> Result<(), ConfigError>;

/// Reads the settings of all `files`, later ones over earlier ones.
pub(super) fn read(files: &[File]) -> Result<Config, ConfigError> {
    let tables = files
        .iter()
        .map(File::parse)
        .collect::<Result<Vec<_>, _>>()?;
    let mut draft = Draft::new();
    for (file, keys) in files.iter().zip(&tables) {
        draft.whole(&Table::whole(file, keys))?;
    }
    draft.finish()
}

impl<'a> Draft<'a> {
    fn new() -> Self {
        Self {
            config: Config::default(),
            policy: POLICIES[0].name,
            search: SEARCHES[0].name,
            seed: 0,
            idle_tax: PolicyOptions::IDLE_TAX,
            from_caches: false,
            direct_ratio: 0.25,
            trace_for: Duration::from_mins(10),
            keep: true,
            every: Duration::from_hours(6),
            listen: None,
            token_file: None,
            certificate: None,
            key: None,
            client_ca: None,
            tcp_read_only: false,
            set: BTreeMap::new(),
        }
    }

    fn whole(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&[
            "mode",
            "turn_interval",
            "total",
            "policy",
            "check",
            "balloon",
            "curves",
            "trace",
            "history",
            "serve",
            "tcp",
            "libvirt",
            "store",
            "vm",
        ])?;
        if let Some(value) = table.get("mode") {
            let modes = [
                ("observe", Mode::Observe),
                ("advise", Mode::Advise),
                ("act", Mode::Act),
            ];
            self.config.mode = value.choice(&modes)?;
        }
        if let Some(value) = table.get("turn_interval") {
            self.config.turn_interval = value.time(SECOND..=HOUR)?;
        }
        if let Some(value) = table.get("total") {
            self.config.total_bytes = if value.is("auto") {
                None
            } else {
                Some(value.size(4 * KIB..=SIZE_MAX)?)
            };
            self.set.insert("total", value);
        }
        let sections: [(_, _, Section<'a>); 10] = [
            ("policy", "policy.", Self::policy),
            ("check", "check.", Self::check),
            ("balloon", "balloon.", Self::balloon),
            ("curves", "curves.", Self::curves),
            ("trace", "trace.", Self::trace),
            ("history", "history.", Self::history),
            ("serve", "serve.", Self::serve),
            ("tcp", "tcp.", Self::tcp),
            ("libvirt", "libvirt.", Self::libvirt),
            ("store", "store.", Self::store),
        ];
        for (name, prefix, read) in sections {
            if let Some(value) = table.get(name) {
                read(self, &value.table(prefix)?)?;
            }
        }
        if let Some(value) = table.get("vm") {
            for rule in value.tables("vm.")? {
                self.config.vms.push(vm(&rule)?);
            }
        }
        Ok(())
    }

    fn policy(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&[
            "name", "search", "seed", "idle_tax", "unit", "step", "gain_min", "cooldown",
        ])?;
        if let Some(value) = table.get("name") {
            let names = POLICIES.iter().map(|row| row.name);
            let names = names.chain(PRESETS.iter().map(|row| row.name));
            self.policy = value.choice(&names.map(|name| (name, name)).collect::<Vec<_>>())?;
            self.set.insert("policy.name", value);
        }
        if let Some(value) = table.get("search") {
            self.search = value.choice(&SEARCHES.each_ref().map(|row| (row.name, row.name)))?;
            self.set.insert("policy.search", value);
        }
        if let Some(value) = table.get("seed") {
            self.seed = value.integer(0..=i64::MAX.unsigned_abs())?;
        }
        if let Some(value) = table.get("idle_tax") {
            self.idle_tax = value.share("from 0 to 1", |share| *share <= 1.0)?;
        }
        if let Some(value) = table.get("unit") {
            self.config.unit_bytes = value.size(4 * KIB..=GIB)?;
            self.set.insert("policy.unit", value);
        }
        if let Some(value) = table.get("step") {
            self.config.step_bytes = value.or_none(|value| value.size(4 * KIB..=SIZE_MAX))?;
            self.set.insert("policy.step", value);
        }
        if let Some(value) = table.get("gain_min") {
            self.config.gain_min = value.share("of 0 or more, below 1", |share| *share < 1.0)?;
        }
        if let Some(value) = table.get("cooldown") {
            self.config.cooldown = value.time(SECOND..=WEEK)?;
        }
        Ok(())
    }

    fn check(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&["after", "tolerance"])?;
        if let Some(value) = table.get("after") {
            self.config.check_after = value.time(SECOND..=HOUR)?;
        }
        if let Some(value) = table.get("tolerance") {
            self.config.tolerance = value.share("from 0 to 1", |share| *share <= 1.0)?;
        }
        Ok(())
    }

    fn balloon(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&["patience"])?;
        if let Some(value) = table.get("patience") {
            self.config.balloon_patience = value.time(SECOND..=HOUR)?;
        }
        Ok(())
    }

    fn curves(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&["from", "direct", "trace_for", "keep", "every"])?;
        if let Some(value) = table.get("from") {
            self.from_caches = value.choice(&[("traps", false), ("caches", true)])?;
            self.set.insert("curves.from", value);
        }
        if let Some(value) = table.get("direct") {
            self.direct_ratio =
                value.share("above 0 and below 1", |share| *share > 0.0 && *share < 1.0)?;
        }
        if let Some(value) = table.get("trace_for") {
            self.trace_for = value.time(SECOND..=WEEK)?;
            self.set.insert("curves.trace_for", value);
        }
        if let Some(value) = table.get("keep") {
            self.keep = value.bool()?;
        }
        if let Some(value) = table.get("every") {
            self.every = value.time(SECOND..=YEAR)?;
            self.set.insert("curves.every", value);
        }
        Ok(())
    }

    fn trace(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&[
            "enabled", "backend", "program", "period", "budget", "window",
        ])?;
        let trace = &mut self.config.trace;
        if let Some(value) = table.get("enabled") {
            trace.enabled = value.bool()?;
        }
        if let Some(value) = table.get("backend") {
            let backends = [("trap", TraceBackend::Trap), ("scan", TraceBackend::Scan)];
            trace.backend = value.choice(&backends)?;
        }
        if let Some(value) = table.get("program") {
            trace.program = if value.is("auto") {
                None
            } else {
                Some(value.path()?)
            };
        }
        if let Some(value) = table.get("period") {
            trace.period = value.time(Duration::from_millis(100)..=HOUR)?;
            self.set.insert("trace.period", value);
        }
        if let Some(value) = table.get("budget") {
            trace.budget = value.share("above 0 and at most 1", |share| {
                *share > 0.0 && *share <= 1.0
            })?;
        }
        if let Some(value) = table.get("window") {
            trace.window = value.time(Duration::from_millis(100)..=WEEK)?;
            self.set.insert("trace.window", value);
        }
        Ok(())
    }

    fn history(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&["file", "size_max", "keep"])?;
        if let Some(value) = table.get("file") {
            self.config.history = value.or_none(Value::path)?;
        }
        if let Some(value) = table.get("size_max") {
            self.config.history_bytes_max = value.size(16 * KIB * KIB..=1024 * GIB)?;
        }
        if let Some(value) = table.get("keep") {
            self.config.history_keep = value.time(3 * HOUR..=10 * YEAR)?;
        }
        Ok(())
    }

    fn serve(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&["socket", "group", "read_only_socket", "read_only_group"])?;
        let serve = &mut self.config.serve;
        if let Some(value) = table.get("socket") {
            serve.socket = value.socket()?;
            self.set.insert("serve.socket", value);
        }
        if let Some(value) = table.get("group") {
            serve.group = value.or_none(Value::text)?;
        }
        if let Some(value) = table.get("read_only_socket") {
            serve.read_only_socket = value.or_none(Value::socket)?;
            self.set.insert("serve.read_only_socket", value);
        }
        if let Some(value) = table.get("read_only_group") {
            serve.read_only_group = value.or_none(Value::text)?;
        }
        Ok(())
    }

    fn tcp(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&[
            "listen",
            "token_file",
            "certificate",
            "key",
            "client_ca",
            "read_only",
        ])?;
        if let Some(value) = table.get("listen") {
            self.listen = value.or_none(|value| {
                let address = value.text().ok().and_then(|text| text.parse().ok());
                address.ok_or_else(|| {
                    value.refuse("address and port, such as \"127.0.0.1:7373\" or \"[::1]:7373\"")
                })
            })?;
            self.set.insert("tcp.listen", value);
        }
        let paths = [
            ("token_file", "tcp.token_file", &mut self.token_file),
            ("certificate", "tcp.certificate", &mut self.certificate),
            ("key", "tcp.key", &mut self.key),
            ("client_ca", "tcp.client_ca", &mut self.client_ca),
        ];
        for (key, name, path) in paths {
            if let Some(value) = table.get(key) {
                *path = value.or_none(Value::path)?;
                self.set.insert(name, value);
            }
        }
        if let Some(value) = table.get("read_only") {
            self.tcp_read_only = value.bool()?;
        }
        Ok(())
    }

    fn libvirt(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&["uri"])?;
        if let Some(value) = table.get("uri") {
            self.config.libvirt = value.or_none(Value::text)?;
        }
        Ok(())
    }

    fn store(&mut self, table: &Table<'a>) -> Result<(), ConfigError> {
        table.only(&["socket"])?;
        if let Some(value) = table.get("socket") {
            self.config.store = value.or_none(Value::socket)?;
        }
        Ok(())
    }

    /// The first of `keys` contradicts the others; told at the first that was set.
    fn contradiction(&self, keys: &[&'static str], message: &str) -> ConfigError {
        let place = keys.iter().find_map(|key| self.set.get(key));
        let place = place.map_or_else(|| "by default".to_owned(), Value::place);
        contradiction(place, keys[0], message)
    }

    fn finish(mut self) -> Result<Config, ConfigError> {
        let config = &self.config;
        if config
            .step_bytes
            .is_some_and(|step| step < config.unit_bytes)
        {
            let message =
                "is less than policy.unit, so that no VM could move; make it a unit or more";
            return Err(self.contradiction(&["policy.step", "policy.unit"], message));
        }
        if config
            .total_bytes
            .is_some_and(|total| total < config.unit_bytes)
        {
            let message = "is less than policy.unit, so that there is nothing to divide";
            return Err(self.contradiction(&["total", "policy.unit"], message));
        }
        if config.trace.window < config.trace.period {
            let message = "is shorter than trace.period; make it a period or more";
            return Err(self.contradiction(&["trace.window", "trace.period"], message));
        }
        if config.serve.read_only_socket.as_ref() == Some(&config.serve.socket) {
            let message = "is also serve.socket; take another path or \"none\"";
            return Err(self.contradiction(&["serve.read_only_socket", "serve.socket"], message));
        }
        if self.from_caches && self.every < self.trace_for {
            let message = "is shorter than curves.trace_for; make it as long or longer";
            return Err(self.contradiction(
                &["curves.every", "curves.trace_for", "curves.from"],
                message,
            ));
        }
        self.config.policy = self.chosen_policy()?;
        if self.from_caches {
            self.config.workflow = Workflow::Cache {
                direct_ratio: self.direct_ratio,
                trace_for: self.trace_for,
                keep: self.keep,
                every: self.every,
            };
        }
        self.config.serve.tcp = self.chosen_tcp()?;
        Ok(self.config)
    }

    fn chosen_policy(&self) -> Result<Policy, ConfigError> {
        // The default search goes with every policy, and a preset's own with it.
        let search =
            Some(self.search).filter(|&search| search != SEARCHES[0].name && search != self.policy);
        let seeded = SEARCHES
            .iter()
            .any(|row| row.name == self.search && row.search.seed().is_some());
        let row = POLICIES.into_iter().find(|row| row.name == self.policy);
        let taxed = row.is_some_and(|row| row.options.contains(&PolicyOption::IdleTax));
        let given = GivenOptions {
            search,
            seed: seeded.then_some(self.seed),
            idle_tax: taxed.then_some(self.idle_tax),
        };
        Policy::by_name(self.policy, given).map_err(|error| {
            let message = format!("{error}; leave it at \"{}\"", SEARCHES[0].name);
            self.contradiction(&["policy.search", "policy.name"], &message)
        })
    }

    fn chosen_tcp(&self) -> Result<Option<TcpSettings>, ConfigError> {
        let given = [
            ("tcp.token_file", &self.token_file),
            ("tcp.certificate", &self.certificate),
            ("tcp.key", &self.key),
            ("tcp.client_ca", &self.client_ca),
        ];
        let Some(listen) = self.listen else {
            return match given.into_iter().find(|(_, path)| path.is_some()) {
                Some((key, _)) => {
                    Err(self.contradiction(&[key], "nothing is served by TCP without tcp.listen"))
                }
                None => Ok(None),
            };
        };
        let tls = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Some(TlsSettings {
                certificate: certificate.clone(),
                key: key.clone(),
                client_ca: self.client_ca.clone(),
            }),
            (Some(_), None) => {
                return Err(self.contradiction(&["tcp.certificate"], "needs tcp.key beside it"));
            }
            (None, Some(_)) => {
                return Err(self.contradiction(&["tcp.key"], "needs tcp.certificate beside it"));
            }
            (None, None) if self.client_ca.is_some() => {
                let message = "needs tcp.certificate and tcp.key beside it";
                return Err(self.contradiction(&["tcp.client_ca"], message));
            }
            (None, None) => None,
        };
        let asked = self.token_file.is_some() || self.client_ca.is_some();
        let harmless = self.tcp_read_only && listen.ip().is_loopback();
        if !asked && !harmless {
            return Err(self.contradiction(
                &["tcp.listen"],
                "needs tcp.token_file or tcp.client_ca, or a loopback address and tcp.read_only = true",
            ));
        }
        Ok(Some(TcpSettings {
            listen,
            token_file: self.token_file.clone(),
            tls,
            read_only: self.tcp_read_only,
        }))
    }
}

fn contradiction(place: String, key: &str, message: &str) -> ConfigError {
    ConfigError::Contradiction {
        place,
        key: key.to_owned(),
        message: message.to_owned(),
    }
}

fn vm(table: &Table<'_>) -> Result<VmRule, ConfigError> {
    table.only(&[
        "name",
        "managed",
        "min",
        "max",
        "baseline",
        "shares",
        "max_loss",
        "self_balloon",
        "disk_admin",
    ])?;
    let Some(name) = table.get("name") else {
        let message = "each rule needs a name, such as \"web-*\", or \"*\" for all VMs";
        return Err(contradiction(table.place(), "vm.name", message));
    };
    let size = |key| {
        let value = table.get(key);
        value.map(|value| value.size(0..=SIZE_MAX)).transpose()
    };
    let flag = |key| table.get(key).map(|value| value.bool()).transpose();
    let mut rule = VmRule::for_name(&name.text()?);
    rule.managed = flag("managed")?;
    rule.min_bytes = size("min")?;
    rule.max_bytes = size("max")?;
    rule.baseline_bytes = size("baseline")?;
    if let Some(value) = table.get("shares") {
        let shares = value.integer(1..=1_000_000)?;
        rule.shares = u32::try_from(shares).ok();
    }
    if let Some(value) = table.get("max_loss") {
        let loss = value.share("from 0 to 10", |share| *share <= 10.0)?;
        rule.max_loss = Some(loss);
    }
    rule.self_balloon = flag("self_balloon")?;
    rule.disk_admin = table
        .get("disk_admin")
        .map(|value| value.socket())
        .transpose()?;
    if let (Some(min), Some(max)) = (rule.min_bytes, rule.max_bytes)
        && min > max
    {
        let message = "is above vm.max of the same rule";
        return Err(contradiction(table.place(), "vm.min", message));
    }
    Ok(rule)
}
