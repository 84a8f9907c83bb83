//! The daemons of a fleet, as Prometheus finds them.
//!
//! Either a list in the form of Prometheus' file and HTTP service discovery (`[{"targets":["10.0.0.1:7373"],"labels":{}}]`,
//! where a label `__scheme__` may be `https`), or the targets that a Prometheus scrapes, by its own API.

use serde::Deserialize;

/// Groups of targets.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TargetGroup {
    targets: Vec<String>,
    #[serde(default)]
    labels: Labels,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
struct Labels {
    #[serde(default, rename = "__scheme__")]
    scheme: Option<String>,
}

/// Prometheus' answer about its targets.
#[derive(Debug, Deserialize)]
struct Targets {
    data: TargetsData,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TargetsData {
    active_targets: Vec<ActiveTarget>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ActiveTarget {
    scrape_url: String,
    #[serde(default)]
    scrape_pool: String,
}

/// The path of Prometheus' API that lists its targets.
pub const TARGETS_PATH: &str = "/api/v1/targets?state=active";

/// Base addresses of the daemons in a list of target groups.
///
/// # Errors
///
/// That the text is no such list.
pub fn of_list(text: &str) -> Result<Vec<String>, serde_json::Error> {
    let groups: Vec<TargetGroup> = serde_json::from_str(text)?;
    let bases = groups.into_iter().flat_map(|group| {
        let scheme = group.labels.scheme.unwrap_or_else(|| "http".to_owned());
        let targets = group.targets.into_iter();
        targets
            .map(|target| match target.contains("://") {
                true => target.trim_end_matches('/').to_owned(),
                false => format!("{scheme}://{target}"),
            })
            .collect::<Vec<_>>()
    });
    Ok(once_each(bases))
}

/// Base addresses of the targets of the scrape job `job`, in Prometheus' answer: what it scrapes, without `/metrics`.
///
/// # Errors
///
/// That the text is no such answer.
pub fn of_prometheus(text: &str, job: &str) -> Result<Vec<String>, serde_json::Error> {
    let targets: Targets = serde_json::from_str(text)?;
    let ours = targets.data.active_targets.into_iter();
    let ours = ours.filter(|target| target.scrape_pool == job);
    Ok(once_each(ours.map(|target| {
        let address = target.scrape_url.split('?').next().unwrap_or_default();
        let base = address.strip_suffix("/metrics").unwrap_or(address);
        base.trim_end_matches('/').to_owned()
    })))
}

fn once_each(bases: impl Iterator<Item = String>) -> Vec<String> {
    let mut found: Vec<String> = bases.collect();
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_prometheus_are_read() {
        let list = r#"[{"targets":["a:7373","http://b:1/"],"labels":{"env":"x"}},
            {"targets":["c:7373","a:7373"],"labels":{"__scheme__":"https"}}]"#;
        let found = of_list(list).unwrap();
        assert_eq!(
            found,
            [
                "http://a:7373",
                "http://b:1",
                "https://a:7373",
                "https://c:7373"
            ]
        );
        assert_eq!(of_list("[]").unwrap(), [""; 0]);
        assert!(of_list("{}").is_err());
        let answer = r#"{"status":"success","data":{"activeTargets":[
            {"discoveredLabels":{},"scrapePool":"plimsoll","scrapeUrl":"https://a:7373/metrics","health":"up"},
            {"scrapePool":"plimsoll","scrapeUrl":"http://gateway/h1/metrics?token=x"},
            {"scrapePool":"plimsoll","scrapeUrl":"http://gateway/h2/metrics"},
            {"scrapePool":"plimsoll","scrapeUrl":"http://b:7373/"},
            {"scrapePool":"node","scrapeUrl":"http://a:9100/metrics"}],"droppedTargets":[]}}"#;
        assert_eq!(
            of_prometheus(answer, "plimsoll").unwrap(),
            [
                "http://b:7373",
                "http://gateway/h1",
                "http://gateway/h2",
                "https://a:7373"
            ]
        );
    }
}
