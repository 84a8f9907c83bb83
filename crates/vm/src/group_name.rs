//! Names for readers of control groups, from their paths.
//!
//! | path ends in | name | kind |
//! |---|---|---|
//! | `nginx.service` and other units | `nginx.service` | systemd |
//! | `docker-ID.scope`, `docker/ID` | `docker-` and 12 digits of the identifier; alike of other runtimes | container |
//! | `lxc.payload.NAME`, `lxc/NAME` | `lxc-NAME` | container |
//! | `...podUID.slice/cri-containerd-ID.scope`, `podUID/ID` | `podUID/` and 12 digits of the identifier | container |
//! | `...podUID.slice`, `podUID` | `podUID` | pod |
//! | `...libpod_pod_ID.slice` of Podman | `pod` and 12 digits of the identifier | pod |
//! | anything else | the last component | other |
//!
//! Whoever may create a group chooses its path, so a name proves nothing, and characters that a terminal could obey are escaped.
//! Several groups may have one name.
//!
//! Source: systemd.slice(5), systemd.scope(5); the paths that runc, containerd, CRI-O, Podman and the kubelet use under either
//! driver of control groups; `lxc.container.conf(5)`.

use plimsoll_flow::GroupKind;

/// Maximum number of characters of a name.
const CHARACTERS_MAX: usize = 80;
/// Digits of a container's identifier in its name, as container runtimes print it.
const DIGITS: usize = 12;
/// Lengths of the identifiers of containers, in hexadecimal digits.
const IDENTIFIERS: std::ops::RangeInclusive<usize> = 32..=64;
/// Ends of the names of systemd's units that are control groups.
const UNITS: &[&str] = &[".service", ".scope", ".slice", ".socket", ".mount", ".swap"];
/// Beginnings of the scopes in which runtimes put containers.
const RUNTIMES: &[&str] = &["docker", "cri-containerd", "crio", "libpod", "nerdctl"];

/// A control group's name, and what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupName {
    /// At most 80 printable characters; not unique.
    pub name: String,
    /// What it holds.
    pub kind: GroupKind,
}

impl GroupName {
    /// The name of the group at this path below the root of its hierarchy.
    pub fn of_path(path: &str) -> Self {
        let mut parts = path.rsplit('/').filter(|part| !part.is_empty());
        let Some(last) = parts.next() else {
            return Self::new(GroupKind::Other, "/");
        };
        let parent = parts.clone().next();
        if let Some((runtime, id)) = container_of(last, parent) {
            let short = &id[..DIGITS];
            let pod = parts.find_map(pod_of).or_else(|| pod_of(last));
            return match pod {
                Some(pod) => Self::new(
                    GroupKind::Container,
                    &format!("pod{}/{short}", shown_pod(&pod)),
                ),
                None => Self::new(GroupKind::Container, &format!("{runtime}-{short}")),
            };
        }
        if let Some(pod) = pod_of(last) {
            return Self::new(GroupKind::Pod, &format!("pod{}", shown_pod(&pod)));
        }
        let of_lxc = last.strip_prefix("lxc.payload.");
        if let Some(name) = of_lxc.or((parent == Some("lxc")).then_some(last)) {
            return Self::new(GroupKind::Container, &format!("lxc-{name}"));
        }
        let is_unit = UNITS.iter().any(|end| last.ends_with(end));
        let kind = match is_unit {
            true => GroupKind::Systemd,
            false => GroupKind::Other,
        };
        Self::new(kind, last)
    }

    /// Whether the group at `path` holds what Podman and CRI-O start beside each container to watch it, conmon.
    pub fn is_monitor(path: &str) -> bool {
        let last = path.rsplit('/').find(|part| !part.is_empty());
        let last = last.map(|last| last.strip_suffix(".scope").unwrap_or(last));
        let parts = last.and_then(|last| last.split_once("-conmon-"));
        parts.is_some_and(|(runtime, id)| RUNTIMES.contains(&runtime) && is_identifier(id))
    }

    /// Whether the group at `path` is meant by `wanted`: its name, or the identifier of its container or its pod, or 12 or more digits
    /// of it.
    pub fn is_meant(wanted: &str, path: &str) -> bool {
        let mut parts = path.rsplit('/').filter(|part| !part.is_empty());
        let Some(last) = parts.next() else {
            return false;
        };
        let identifier = match container_of(last, parts.next()) {
            Some((_, id)) => Some(id.to_owned()),
            None => pod_of(last),
        };
        let begins = |id: String| wanted.len() >= DIGITS && id.starts_with(wanted);
        identifier.is_some_and(begins) || Self::of_path(path).name == wanted
    }

    fn new(kind: GroupKind, name: &str) -> Self {
        let name = escaped(name);
        let name = match name.chars().count() > CHARACTERS_MAX {
            true => name.chars().take(CHARACTERS_MAX - 1).chain(['…']).collect(),
            false => name,
        };
        Self { name, kind }
    }
}

/// A name or a path with all characters escaped that a terminal could obey, or that are invisible.
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\\' | '"' | '\'' => shown.push(character),
            other => shown.extend(other.escape_debug()),
        }
    }
    shown
}

/// The runtime and the identifier of a container, by the group's own name and that of the group above it.
fn container_of<'a>(last: &'a str, parent: Option<&'a str>) -> Option<(&'a str, &'a str)> {
    if is_identifier(last) {
        return Some((parent?, last));
    }
    // As runc writes it where the runtime does not use systemd: SLICE:RUNTIME:ID.
    if let Some((rest, id)) = last.rsplit_once(':')
        && let Some((_, runtime)) = rest.rsplit_once(':')
        && is_identifier(id)
    {
        return Some((runtime, id));
    }
    // Podman and CRI-O write the same without systemd, but for the end.
    let scope = last.strip_suffix(".scope").unwrap_or(last);
    RUNTIMES.iter().find_map(|runtime| {
        let id = scope.strip_prefix(runtime)?.strip_prefix('-')?;
        // Podman below the group of a service (`--cgroups=split`, as in units of Quadlet).
        let id = id.strip_prefix("payload-").unwrap_or(id);
        is_identifier(id).then_some((*runtime, id))
    })
}

fn is_identifier(text: &str) -> bool {
    IDENTIFIERS.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A pod's identifier in names: a UID of Kubernetes, or the first digits of one of Podman.
fn shown_pod(pod: &str) -> &str {
    match pod.contains('-') || pod.len() == 32 {
        true => pod,
        false => &pod[..DIGITS],
    }
}

/// The identifier of a pod, by the name of one group of its path: a UID of Kubernetes, or 64 digits of Podman.
fn pod_of(part: &str) -> Option<String> {
    let of_podman = || {
        let (_, id) = part.strip_suffix(".slice")?.split_once("libpod_pod_")?;
        is_identifier(id).then(|| id.to_owned())
    };
    if let Some(id) = of_podman() {
        return Some(id);
    }
    let slice = part.split(':').next()?;
    let uid = match slice.strip_suffix(".slice") {
        // The kubelet's slices lie in others where it runs in a container, as in kind: `kubelet-kubepods-`.
        Some(slice) => slice
            .split_once("kubepods-")?
            .1
            .rsplit('-')
            .next()?
            .strip_prefix("pod")?,
        None => slice.strip_prefix("pod")?,
    };
    let uid = uid.replace('_', "-");
    let digits = uid.bytes().filter(u8::is_ascii_hexdigit).count();
    let is_uid = digits == 32
        && uid
            .bytes()
            .all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    is_uid.then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4f0c2b7a91d84f0c2b7a91d84f0c2b7a91d84f0c2b7a91d84f0c2b7a91d8abcd";
    const POD: &str = "3d1f6f2a-0a8e-4c1b-9a51-2f7c3b1d9e10";

    #[test]
    fn paths_of_systemd_containers_and_pods_have_the_names_that_their_tools_show() {
        let under = POD.replace('-', "_");
        let short = &ID[..12];
        let in_pod = format!("pod{POD}/{short}");
        let known = [
            (
                "/system.slice/nginx.service".to_owned(),
                "nginx.service".to_owned(),
                GroupKind::Systemd,
            ),
            (
                "/user.slice/user-7.slice".to_owned(),
                "user-7.slice".to_owned(),
                GroupKind::Systemd,
            ),
            (
                format!("/system.slice/docker-{ID}.scope"),
                format!("docker-{short}"),
                GroupKind::Container,
            ),
            (
                format!("/docker/{ID}"),
                format!("docker-{short}"),
                GroupKind::Container,
            ),
            (
                format!("/machine.slice/libpod-{ID}.scope"),
                format!("libpod-{short}"),
                GroupKind::Container,
            ),
            (
                format!("/libpod_parent/libpod-{ID}"),
                format!("libpod-{short}"),
                GroupKind::Container,
            ),
            (
                format!("/system.slice/web.service/libpod-payload-{ID}"),
                format!("libpod-{short}"),
                GroupKind::Container,
            ),
            (
                "/lxc.payload.web".to_owned(),
                "lxc-web".to_owned(),
                GroupKind::Container,
            ),
            (
                "/lxc/101".to_owned(),
                "lxc-101".to_owned(),
                GroupKind::Container,
            ),
            (
                format!("/machine.slice/machine-libpod_pod_{ID}.slice"),
                format!("pod{short}"),
                GroupKind::Pod,
            ),
            (
                format!("/machine.slice/machine-libpod_pod_{ID}.slice/libpod-{ID}.scope"),
                format!("pod{short}/{short}"),
                GroupKind::Container,
            ),
            (
                format!("/default/{ID}"),
                format!("default-{short}"),
                GroupKind::Container,
            ),
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                in_pod.clone(),
                GroupKind::Container,
            ),
            (
                format!("/kubepods.slice/kubepods-pod{under}.slice/crio-{ID}.scope"),
                in_pod.clone(),
                GroupKind::Container,
            ),
            (
                format!(
                    "/docker/{ID}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                in_pod.clone(),
                GroupKind::Container,
            ),
            (
                format!("/kubepods/burstable/pod{POD}/crio-{ID}"),
                in_pod.clone(),
                GroupKind::Container,
            ),
            (
                format!("/kubepods/burstable/pod{POD}/{ID}"),
                in_pod.clone(),
                GroupKind::Container,
            ),
            (
                format!(
                    "/system.slice/containerd.service/kubepods-pod{under}.slice:cri-containerd:{ID}"
                ),
                in_pod,
                GroupKind::Container,
            ),
            (
                format!(
                    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{under}.slice"
                ),
                format!("pod{POD}"),
                GroupKind::Pod,
            ),
            (
                format!("/kubepods/pod{POD}"),
                format!("pod{POD}"),
                GroupKind::Pod,
            ),
            (
                format!("/crio-conmon-{ID}.scope"),
                format!("crio-conmon-{ID}.scope"),
                GroupKind::Systemd,
            ),
            ("/podium".to_owned(), "podium".to_owned(), GroupKind::Other),
            ("/".to_owned(), "/".to_owned(), GroupKind::Other),
        ];
        for (path, name, kind) in known {
            let expected = GroupName::new(kind, &name);
            assert_eq!(GroupName::of_path(&path), expected, "{path}");
        }
    }

    #[test]
    fn the_monitor_of_a_container_is_no_container() {
        for runtime in ["libpod", "crio"] {
            for end in ["", ".scope"] {
                let path = format!("/machine.slice/{runtime}-conmon-{ID}{end}");
                assert!(GroupName::is_monitor(&path), "{path}");
                let path = format!("/machine.slice/{runtime}-{ID}{end}");
                assert!(!GroupName::is_monitor(&path), "{path}");
            }
        }
        for path in ["/libpod-conmon-1.scope", "/x/conmon", "/"] {
            assert!(!GroupName::is_monitor(path), "{path}");
        }
    }

    #[test]
    fn a_hostile_name_is_escaped_and_cut() {
        let name = |path: &str| GroupName::of_path(path).name;
        assert_eq!(name("/a\n\u{1b}[2J\u{202e}b"), r"a\n\u{1b}[2J\u{202e}b");
        assert_eq!(name(r"/dev-disk\x2dby.mount"), r"dev-disk\x2dby.mount");
        let long = name(&format!("/{}", "x".repeat(255)));
        assert_eq!(long.chars().count(), 80);
        assert!(long.ends_with('…'));
        assert_eq!(name("//"), "/");
        // No identifier is cut within a character.
        assert_eq!(name(&format!("/docker/{}", "é".repeat(20))), "é".repeat(20));
    }
}
