//! Builds the firmware image with the system's C compiler and linker.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// Size of the image: the processor starts 16 bytes before its end.
const IMAGE_BYTES: u64 = 64 << 10;

const OPTIONS: &[&str] = &[
    "-m64",
    "-O2",
    "-std=gnu11",
    "-ffreestanding",
    "-fno-pic",
    "-no-pie",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-fno-asynchronous-unwind-tables",
    "-mgeneral-regs-only",
    "-mno-red-zone",
    "-nostdlib",
    "-static",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wl,--oformat=binary,--build-id=none,-n,--no-warn-rwx-segments",
];

fn main() {
    let sources = ["src/guest.ld", "src/start.S", "src/workload.c"];
    for source in sources {
        println!("cargo::rerun-if-changed={source}");
    }
    println!("cargo::rerun-if-env-changed=CC");
    let compiler = env::var("CC").unwrap_or_else(|_| "gcc".to_owned());
    let image = Path::new(&env::var_os("OUT_DIR").expect("cargo sets it")).join("guest.rom");
    let script = format!("-Wl,-T,{}", sources[0]);
    let built = Command::new(&compiler)
        .args(OPTIONS)
        .arg(script)
        .args(&sources[1..])
        .arg("-o")
        .arg(&image)
        .status();
    assert!(
        built.is_ok_and(|status| status.success()),
        "{compiler} cannot build the test guest: gcc and binutils for x86-64 are needed"
    );
    let bytes = fs::metadata(&image).map(|file| file.len());
    assert!(
        bytes.as_ref().is_ok_and(|&bytes| bytes == IMAGE_BYTES),
        "the image of the test guest has {bytes:?} bytes instead of {IMAGE_BYTES}: see src/guest.ld"
    );
}
