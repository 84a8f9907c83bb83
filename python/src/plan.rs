//! Memory allocated among VMs, as by `plimsoll plan`.

use std::num::NonZeroU32;

use plimsoll_flow::PageSize;
use plimsoll_policy::{GivenOptions, Policy, Rules};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::plan::{DemandJson, PlanInputs, RulesJson};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::PyMapping;

use crate::curve::Curve;
use crate::errors::{self, OrRaise as _};
use crate::options::{self, Bytes, PerSecondValue, ShareValue};

/// The attributes of `plimsoll_mrc.Vm`.
struct Vm<'py> {
    curve: Option<Bound<'py, Curve>>,
    baseline: Option<Bytes>,
    current: Option<Bytes>,
    min: Bytes,
    max: Option<Bytes>,
    shares: NonZeroU32,
    max_loss: Option<ShareValue>,
    max_misses: Option<PerSecondValue>,
    working_set: Option<Bytes>,
}

/// Not derived, for which every wrong value is of a wrong type.
impl<'py> FromPyObject<'_, 'py> for Vm<'py> {
    type Error = PyErr;

    fn extract(vm: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let attribute = |name| {
            vm.getattr(name).map_err(|error| {
                if error.is_instance_of::<PyAttributeError>(vm.py()) {
                    options::other_type("a Vm", &vm)
                } else {
                    error
                }
            })
        };
        let shares = options::whole(&attribute("shares")?)?;
        let shares = u32::try_from(shares).ok().and_then(NonZeroU32::new);
        Ok(Self {
            curve: attribute("curve")?.extract()?,
            baseline: attribute("baseline")?.extract()?,
            current: attribute("current")?.extract()?,
            min: attribute("min")?.extract()?,
            max: attribute("max")?.extract()?,
            shares: shares.ok_or_else(|| {
                errors::option("shares: expected a whole number from 1 to 2^32 - 1".to_owned())
            })?,
            max_loss: attribute("max_loss")?.extract()?,
            max_misses: attribute("max_misses")?.extract()?,
            working_set: attribute("working_set")?.extract()?,
        })
    }
}

impl Vm<'_> {
    fn demand(&self, name: String, max_loss: ShareValue) -> PyResult<DemandJson> {
        let curve = self.curve.as_ref().map(|curve| curve.get());
        let observed = curve.and_then(|curve| Some(curve.baseline?.to_bytes(curve.page_size)));
        let baseline = self.baseline.map(|Bytes(bytes)| bytes).or(observed);
        let Some(baseline) = baseline else {
            return Err(errors::plan(format!(
                "VM {name} has no baseline: its curve does not record one, so give Vm(baseline=SIZE)"
            )));
        };
        Ok(DemandJson {
            curve: curve.map(|curve| curve.json(&name)),
            vm: name,
            baseline_bytes: baseline,
            current_bytes: self.current.map_or(baseline, |Bytes(bytes)| bytes),
            floor_bytes: self.min.0,
            ceiling_bytes: self.max.map(|Bytes(bytes)| bytes),
            max_loss: match self.max_misses {
                Some(_) => self.max_loss,
                None => self.max_loss.or(Some(max_loss)),
            }
            .map(|share| share.0),
            max_misses_per_second: self.max_misses.map(|rate| rate.0),
            shares: self.shares.into(),
            working_set_bytes: self.working_set.map(|Bytes(bytes)| bytes),
        })
    }
}

/// Allocates `total` bytes of memory among VMs, and returns the allocation as the document that `plimsoll plan -o json` writes.
///
/// `vms` has a `Vm` for each name. Policies, searches and their options are those of `plimsoll plan`. Sizes are bytes, or
/// text such as "480M"; shares are numbers, or text such as "5%". `max_loss` holds for VMs with neither `max_loss` nor
/// `max_misses` of their own. Raises `InfeasibleError` if no allocation keeps every VM within its minimum size and bounds; a VM whose
/// maximum size forbids that has this size, and `relative` shows its misses there.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "named arguments in Python")]
#[pyo3(signature = (
    vms, total, *, policy="isolated", search=None, max_loss=ShareValue(0.05), unit=Bytes(4 << 20), step=None,
    gain_min=ShareValue(0.0), idle_tax=None, seed=None
), text_signature = "(vms, total, *, policy='isolated', search=None, max_loss='5%', unit='4M', step=None, gain_min=0.0, idle_tax=None, seed=None)")]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    vms: &Bound<'py, PyMapping>,
    total: Bytes,
    policy: &str,
    search: Option<&str>,
    max_loss: ShareValue,
    unit: Bytes,
    step: Option<Bytes>,
    gain_min: ShareValue,
    idle_tax: Option<ShareValue>,
    #[pyo3(from_py_with = options::whole_or_none)] seed: Option<u64>,
) -> PyResult<Bound<'py, PyAny>> {
    let given = GivenOptions {
        search,
        seed,
        idle_tax: idle_tax.map(|share| share.0),
    };
    let policy = Policy::by_name(policy, given).or_raise()?;
    let mut demands = Vec::new();
    for item in vms.items()? {
        let (name, vm): (Bound<'_, PyAny>, Vm<'_>) = item.extract()?;
        demands.push(vm.demand(name.extract()?, max_loss)?);
    }
    let page_bytes = demands
        .iter()
        .find_map(|demand| Some(demand.curve.as_ref()?.page_bytes));
    let inputs = PlanInputs {
        schema: SCHEMA,
        page_bytes: page_bytes.unwrap_or(PageSize::FOUR_KIB.bytes()),
        policy,
        rules: RulesJson {
            total_bytes: total.0,
            unit_bytes: unit.0,
            step_bytes: step.map(|Bytes(bytes)| bytes),
            gain_min: gain_min.0,
            miss_ratio_min: Rules::MISS_RATIO_MIN,
        },
        demands,
    };
    let plan = py.detach(|| inputs.plan()).or_raise()?;
    let plan = serde_json::to_string(&plan).or_raise()?;
    py.import("json")?.call_method1("loads", (plan,))
}
