//! The keys of the configuration, their kinds of values, and contradictions between them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use plimsoll_flow::TraceMethod;
use plimsoll_policy::registry::SEARCHES;
use plimsoll_policy::{GivenOptions, POLICIES, Policy, PolicyOption, PolicyOptions};
use plimsoll_protocol::decision::Mode;
use plimsoll_protocol::vm::Promise;
use plimsoll_trap::BackendSetting;
use serde::Deserialize;
use toml::Spanned;

use super::file::File;
use super::values::{
    ABOVE_0_BELOW_1, ABOVE_0_TO_1, Address, AtExit, BELOW_1, CurveOrigin, EventRate, FROM_0_TO_1,
    FROM_0_TO_10, FilePath, Flag, Kind, OrAuto, OrNone, Patterns, PolicyName, RawValue, SearchName,
    ShareIn, Size, SocketPath, Text, Time, Users, Uuid, Wait, WholeNumber, Word,
};
use super::{
    BASELINE_BYTES_MIN, Config, ConfigError, SHARES_MAX, TcpSettings, TlsSettings, VmRule, Workflow,
};

const PAGE: u64 = 4 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Minimum period of sampled working sets (\[Waldspurger02\] §5.3).
const SAMPLING_PERIOD: Duration = Duration::from_secs(30);
/// More than the memory of any host.
const SIZE_MAX: u64 = 1 << 50;
const SECOND: u64 = 1000;
const HOUR: u64 = 3600 * SECOND;
const WEEK: u64 = 7 * 24 * HOUR;
const YEAR: u64 = 365 * 24 * HOUR;

/// Maximum of groups.max: each group has a tracer, a process.
const GROUPS_MAX: u64 = 256;

/// Maximum number of errors in spite of which a configuration is read.
const ERRORS_MAX: usize = 64;

/// The value of an optional key, with its position in the file.
type Key = Option<Spanned<RawValue>>;

/// Declares the keys of each section, and stores those of a file, with their positions, in the setting beside them.
macro_rules! keys {
    (
        $merge:ident;
        $($key:ident: $kind:ty => $to:expr,)*
        $([$section:ident, $keys:ident]: $header:literal { $($field:ident: $field_kind:ty => $field_to:expr,)* })*
    ) => {
        #[derive(Deserialize, Default)]
        #[serde(default, deny_unknown_fields)]
        struct Keys {
            $($key: Key,)*
            $($section: $keys,)*
            vm: Vec<Spanned<VmKeys>>,
        }

        $(
            #[derive(Deserialize, Default)]
            #[serde(default, deny_unknown_fields, expecting = $header)]
            struct $keys {
                $($field: Key,)*
            }
        )*

        impl Merge {
            fn add(&mut self, file: &File, keys: Keys) -> Result<(), ConfigError> {
                let $merge = self;
                $(if let Some(written) = keys.$key {
                    $to = file.value::<$kind>(stringify!($key), &written)?;
                    $merge.places.insert(stringify!($key), file.place(written.span().start));
                })*
                $($(if let Some(written) = keys.$section.$field {
                    let name = concat!(stringify!($section), ".", stringify!($field));
                    $field_to = file.value::<$field_kind>(name, &written)?;
                    $merge.places.insert(name, file.place(written.span().start));
                })*)*
                for rule in keys.vm {
                    let place = file.place(rule.span().start);
                    $merge.config.vms.push(rule.into_inner().rule(file, &place)?);
                }
                Ok(())
            }
        }
    };
}

keys! {
    all;
    mode: Word<Mode> => all.config.mode,
    turn_interval: Time<SECOND, HOUR> => all.config.turn_interval,
    total: OrAuto<Size<PAGE, SIZE_MAX>> => all.config.total_bytes,
    [policy, PolicyKeys]: "a section: write [policy]" {
        name: Word<PolicyName> => all.policy,
        search: Word<SearchName> => all.search,
        seed: WholeNumber<0, { i64::MAX.unsigned_abs() }> => all.seed,
        idle_tax: ShareIn<FROM_0_TO_1> => all.idle_tax,
        unit: Size<PAGE, GIB> => all.config.unit_bytes,
        step: OrNone<Size<PAGE, SIZE_MAX>> => all.config.step_bytes,
        gain_min: ShareIn<BELOW_1> => all.config.gain_min,
        cooldown: Time<SECOND, WEEK> => all.config.cooldown,
        miss_cost: Wait => all.config.miss_cost_ms,
    }
    [check, CheckKeys]: "a section: write [check]" {
        after: Time<SECOND, HOUR> => all.config.check_after,
        tolerance: ShareIn<FROM_0_TO_1> => all.config.tolerance,
    }
    [balloon, BalloonKeys]: "a section: write [balloon]" {
        patience: Time<SECOND, HOUR> => all.config.balloon_patience,
    }
    [guard, GuardKeys]: "a section: write [guard]" {
        headroom: OrAuto<Size<0, SIZE_MAX>> => all.config.headroom_bytes,
        on_exit: Word<AtExit> => all.config.gives_back_on_exit,
    }
    [curves, CurvesKeys]: "a section: write [curves]" {
        from: Word<CurveOrigin> => all.from_caches,
        direct: ShareIn<ABOVE_0_BELOW_1> => all.direct_ratio,
        trace_for: Time<SECOND, WEEK> => all.trace_for,
        keep: Flag => all.keep,
        every: Time<SECOND, YEAR> => all.every,
    }
    [trace, TraceKeys]: "a section: write [trace]" {
        enabled: Flag => all.config.trace.enabled,
        backend: Word<BackendSetting> => all.config.trace.backend,
        program: OrAuto<FilePath> => all.config.trace.program,
        period: Time<100, HOUR> => all.config.trace.period,
        budget: ShareIn<ABOVE_0_TO_1> => all.config.trace.budget,
        intermittent: Flag => all.config.trace.intermittent,
        window: Time<100, WEEK> => all.config.trace.window,
    }
    [history, HistoryKeys]: "a section: write [history]" {
        file: OrNone<FilePath> => all.config.history,
        size_max: Size<{ 16 * MIB }, { 1024 * GIB }> => all.config.history_bytes_max,
        keep: Time<{ 3 * HOUR }, { 10 * YEAR }> => all.config.history_keep,
    }
    [serve, ServeKeys]: "a section: write [serve]" {
        socket: SocketPath => all.config.serve.socket,
        group: OrNone<Text> => all.config.serve.group,
        read_only_socket: OrNone<SocketPath> => all.config.serve.read_only_socket,
        read_only_group: OrNone<Text> => all.config.serve.read_only_group,
        curve_buckets: Flag => all.config.serve.curve_buckets,
    }
    [tcp, TcpKeys]: "a section: write [tcp]" {
        listen: OrNone<Address> => all.listen,
        token_file: OrNone<FilePath> => all.token_file,
        certificate: OrNone<FilePath> => all.certificate,
        key: OrNone<FilePath> => all.key,
        client_ca: OrNone<FilePath> => all.client_ca,
        plain_text: Flag => all.plain_text,
        read_only: Flag => all.tcp_read_only,
    }
    [libvirt, LibvirtKeys]: "a section: write [libvirt]" {
        uri: OrNone<Text> => all.config.libvirt,
    }
    [hosts, HostsKeys]: "a section: write [hosts]" {
        users: Users => all.config.users,
    }
    [groups, GroupsKeys]: "a section: write [groups]" {
        watch: Patterns => all.config.groups.watch,
        max: WholeNumber<1, GROUPS_MAX> => all.config.groups.max,
    }
    [store, StoreKeys]: "a section: write [store]" {
        socket: OrNone<SocketPath> => all.config.store,
    }
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields, expecting = "rules, each headed [[vm]]")]
struct VmKeys {
    name: Key,
    uuid: Key,
    managed: Key,
    min: Key,
    max: Key,
    baseline: Key,
    swap: Key,
    shares: Key,
    max_loss: Key,
    max_misses: Key,
    max_stall: Key,
    self_balloon: Key,
    disk_admin: Key,
    allow_namespaced: Key,
}

/// The settings of all files so far, with those keys that form a setting only in combination.
#[derive(Clone)]
struct Merge {
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
    plain_text: bool,
    tcp_read_only: bool,
    /// File and line of each key's last value.
    places: BTreeMap<&'static str, String>,
}

/// Reads the settings of all `files`, later ones over earlier ones.
pub(super) fn read(files: &[File]) -> Result<Config, ConfigError> {
    let mut merge = Merge::begun();
    for file in files {
        merge.add(file, file.parse()?)?;
    }
    merge.finish()
}

/// The same without the lines that are wrong, whose errors are returned as well.
///
/// # Errors
///
/// More than [`ERRORS_MAX`] errors, or one that leaves open which history is meant.
pub(super) fn read_tolerantly(files: &[File]) -> Result<(Config, Vec<ConfigError>), ConfigError> {
    let mut merge = Merge::begun();
    let mut errors = Vec::new();
    for file in files {
        let mut rest = file.clone();
        loop {
            let mut merged = merge.clone();
            let read = rest.parse().and_then(|keys| merged.add(&rest, keys));
            let Err(error) = read else {
                merge = merged;
                break;
            };
            let line = error.line().filter(|&line| {
                let text = rest.text_of(line);
                // A line that is no TOML has no key.
                let of_history = match error.key() {
                    Some(key) => {
                        key.contains("history") || key.split('.').next_back() == Some("file")
                    }
                    None => text.contains("history") || text.starts_with("file"),
                };
                !text.is_empty() && !of_history && errors.len() < ERRORS_MAX
            });
            let Some(line) = line else {
                return Err(error);
            };
            // Of a rule that contradicts itself nothing is to become part of the one before it.
            let is_rule = matches!(error, ConfigError::Contradiction { .. });
            rest = rest.without(line, is_rule);
            errors.push(error);
        }
    }
    // Some contradict each other.
    let config = merge.config.clone();
    let config = merge.finish().unwrap_or_else(|error| {
        errors.push(error);
        config
    });
    Ok((config, errors))
}

impl Merge {
    /// The defaults.
    fn begun() -> Self {
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
            plain_text: false,
            tcp_read_only: false,
            places: BTreeMap::new(),
        }
    }

    /// Reports that the first of `keys` contradicts the others; the place is that of the first that is set.
    fn contradiction(&self, keys: &[&'static str], message: &str) -> ConfigError {
        let place = keys.iter().find_map(|key| self.places.get(key));
        contradiction(place.map_or("by default", String::as_str), keys[0], message)
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
        if self.config.policy.row().from_working_sets {
            self.sample_working_sets()?;
        }
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

    /// Sets the tracers to what the policy needs: the sampler, with a period of the publication's 30 s or more.
    fn sample_working_sets(&mut self) -> Result<(), ConfigError> {
        const SAMPLER: BackendSetting = BackendSetting::Method(TraceMethod::SampledPages);
        let trace = &mut self.config.trace;
        match trace.backend {
            BackendSetting::Auto | SAMPLER => trace.backend = SAMPLER,
            BackendSetting::Method(_) => {
                let message = format!(
                    "policy {} samples pages by itself; leave it at \"{}\"",
                    self.policy,
                    BackendSetting::AUTO
                );
                return Err(self.contradiction(&["trace.backend", "policy.name"], &message));
            }
        }
        trace.period = trace.period.max(SAMPLING_PERIOD);
        trace.window = trace.window.max(trace.period);
        Ok(())
    }

    fn chosen_policy(&self) -> Result<Policy, ConfigError> {
        // The default search works with every policy, and a preset's own search with that preset.
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
        if self.token_file.is_some()
            && tls.is_none()
            && !listen.ip().is_loopback()
            && !self.plain_text
        {
            return Err(self.contradiction(
                &["tcp.token_file"],
                &format!(
                    "clients would send the token to {listen} in plain text; set tcp.certificate and tcp.key, or a \
                     loopback address; tcp.plain_text = true if nobody else can read that network"
                ),
            ));
        }
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

fn contradiction(place: &str, key: &str, message: &str) -> ConfigError {
    ConfigError::Contradiction {
        place: place.to_owned(),
        key: key.to_owned(),
        message: message.to_owned(),
    }
}

impl VmKeys {
    /// The rule defined by these keys of the table at `place`.
    fn rule(self, file: &File, place: &str) -> Result<VmRule, ConfigError> {
        let uuid = value::<Uuid>(file, "vm.uuid", self.uuid)?;
        let name = value::<Text>(file, "vm.name", self.name)?;
        let Some(name) = name.or_else(|| uuid.as_ref().map(|_| "*".to_owned())) else {
            let message =
                "each rule needs a name, such as \"web-*\", or \"*\" for all VMs, or a uuid";
            return Err(contradiction(place, "vm.name", message));
        };
        let size = |key, written| value::<Size<0, SIZE_MAX>>(file, key, written);
        let flag = |key, written| value::<Flag>(file, key, written);
        let promise = Promise {
            max_loss: value::<ShareIn<FROM_0_TO_10>>(file, "vm.max_loss", self.max_loss)?,
            max_misses_per_second: value::<EventRate>(file, "vm.max_misses", self.max_misses)?,
            max_stall: value::<ShareIn<FROM_0_TO_1>>(file, "vm.max_stall", self.max_stall)?,
        };
        let shares =
            value::<WholeNumber<1, { SHARES_MAX as u64 }>>(file, "vm.shares", self.shares)?;
        let rule = VmRule {
            name,
            uuid,
            managed: flag("vm.managed", self.managed)?,
            min_bytes: size("vm.min", self.min)?,
            max_bytes: size("vm.max", self.max)?,
            baseline_bytes: value::<Size<BASELINE_BYTES_MIN, SIZE_MAX>>(
                file,
                "vm.baseline",
                self.baseline,
            )?,
            swap_bytes: size("vm.swap", self.swap)?,
            shares: shares.and_then(|shares| u32::try_from(shares).ok()),
            promise: Some(promise).filter(|promise| *promise != Promise::default()),
            self_balloon: flag("vm.self_balloon", self.self_balloon)?,
            disk_admin: value::<SocketPath>(file, "vm.disk_admin", self.disk_admin)?,
            allow_namespaced: flag("vm.allow_namespaced", self.allow_namespaced)?,
        };
        if let (Some(min), Some(max)) = (rule.min_bytes, rule.max_bytes)
            && min > max
        {
            let message = "is above vm.max of the same rule";
            return Err(contradiction(place, "vm.min", message));
        }
        Ok(rule)
    }
}

/// The value of an optional key.
fn value<K: Kind>(file: &File, key: &str, written: Key) -> Result<Option<K::Value>, ConfigError> {
    written
        .map(|written| file.value::<K>(key, &written))
        .transpose()
}
