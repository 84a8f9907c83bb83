//! Virtual machines and control groups: names and kinds, and the mappings of a VM's memory.

use std::fmt;

/// Name of a VM, unique on its host.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub String);

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The accelerator that executes a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Accelerator {
    /// The processor itself, through KVM.
    Kvm,
    /// QEMU's translator: the guest is emulated.
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// What a control group holds, judged by its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum GroupKind {
    /// A unit of systemd: a service, a scope or a slice.
    Systemd,
    /// A container, also one of a pod.
    Container,
    /// A Kubernetes pod, with all its containers.
    Pod,
    /// Anything else.
    Other,
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Systemd => "systemd",
            Self::Container => "container",
            Self::Pod => "pod",
            Self::Other => "other",
        })
    }
}

/// Backing of a mapping of guest RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RamBacking {
    /// A memfd mapped shared (`memory-backend-memfd,share=on`).
    SharedMemfd,
    /// A tmpfs file mapped shared (`memory-backend-file` under `/dev/shm`).
    SharedTmpfs,
    /// Memory private to the process: anonymous, or a private mapping.
    Private,
    /// Huge pages of hugetlbfs.
    HugeTlb,
    /// A file of another file system, with the path that the kernel reports.
    File(String),
}

impl fmt::Display for RamBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SharedMemfd => f.write_str("shared memfd"),
            Self::SharedTmpfs => f.write_str("shared tmpfs file"),
            Self::Private => f.write_str("private memory"),
            Self::HugeTlb => f.write_str("huge pages"),
            Self::File(path) => write!(f, "file {path}"),
        }
    }
}

/// One mapping of guest RAM in the address space of the VM's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamMapping {
    /// First address in the VM's process, page-aligned.
    pub address: u64,
    /// Length in bytes, a whole number of pages.
    pub len_bytes: u64,
    /// Offset of the mapping in its backing file, in bytes.
    pub file_offset_bytes: u64,
    /// The backing of its pages.
    pub backing: RamBacking,
}
