#!/bin/sh
# In a fresh Debian with QEMU and without a compiler: installs a .deb, lists a VM, and purges it again. Called by test.sh.
set -eu

package=$1
say() { printf '      %s\n' "$*" >&2; }
die() {
    printf 'package: %s\n' "$*" >&2
    exit 1
}
# files: what is on the disk, apart from what dpkg and its tools keep themselves.
files() {
    find / -xdev \( -path /var/lib/dpkg -o -path /var/cache -o -path /var/log -o -path /packages -o -path /packaging \) -prune \
        -o -print | grep -v '^/etc/g\?shadow-\?$\|^/etc/group-\?$' | LC_ALL=C sort
}

! command -v cc gcc rustc >/dev/null || die "there is a compiler"
files >/tmp/before
qemu-system-x86_64 -name first -accel tcg -display none -m 64M -nodefaults -object memory-backend-memfd,id=ram,size=64M,share=on \
    -machine memory-backend=ram -qmp unix:/tmp/first.qmp,server=on,wait=off &
qemu=$!

began=$(date +%s%N)
dpkg -i "$package" >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
# Without systemd its unit is started by hand, with the directories that it has.
unit=/usr/lib/systemd/system/plimsolld.service
[ -L /etc/systemd/system/multi-user.target.wants/plimsolld.service ] || die "the service is not enabled"
mkdir -p /run/plimsoll /var/lib/plimsoll
$(sed -n 's/^ExecStart=//p' "$unit") >/tmp/daemon.log 2>&1 &
daemon=$!
until plimsoll vms -o csv 2>/dev/null | grep '^first,'; do
    kill -0 "$daemon" || die "plimsolld ended: $(cat /tmp/daemon.log)"
    [ "$(($(date +%s%N) - began))" -lt 120000000000 ] || die "two minutes, and no VM: $(cat /tmp/daemon.log)"
    sleep 0.1
done
say "from the package to the first VM: $((($(date +%s%N) - began) / 1000000)) ms"

plimsoll --version >/dev/null
plimsolld --version >/dev/null
plimsoll top --once | grep -q 'mode observe' || die "the daemon does more than observe"
code=0
plimsoll doctor >/tmp/doctor.log || code=$?
grep -q userfaultfd /tmp/doctor.log || die "doctor printed, with exit code $code: $(cat /tmp/doctor.log)"
plimsoll doctor first >/tmp/doctor.log || true
grep -q first-touch /tmp/doctor.log || die "doctor printed of a VM: $(cat /tmp/doctor.log)"
for page in plimsoll plimsoll-vms plimsoll-report-mrc plimsolld; do
    man -w "$page" >/dev/null || die "there is no man page of $page"
    man "$page" | grep -q NAME || die "the man page of $page is not formatted"
done
for program in plimsoll plimsolld; do
    bash -euc ". /usr/share/bash-completion/completions/$program && complete -p $program" >/dev/null || die "no completions in bash"
    [ -s "/usr/share/zsh/vendor-completions/_$program" ] || die "no completions for zsh"
    [ -s "/usr/share/fish/vendor_completions.d/$program.fish" ] || die "no completions for fish"
done
/usr/libexec/plimsoll-vhost-user-blk --print-capabilities | grep -q block || die "the backend of vhost-user does not run"
getent group plimsoll plimsoll-ro >/dev/null || die "the groups are missing"

# A second installation is an upgrade, and keeps what the administrator configured.
echo 'mode = "advise"' >>/etc/plimsoll/plimsoll.toml
dpkg -i "$package" >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
grep -q '^mode = "advise"' /etc/plimsoll/plimsoll.toml || die "an upgrade overwrites the configuration"

kill "$daemon"
wait "$daemon" || die "plimsolld ends with an error: $(cat /tmp/daemon.log)"
dpkg -r plimsoll >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
[ -f /etc/plimsoll/plimsoll.toml ] || die "a removal removes the configuration"
dpkg -P plimsoll >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
kill -0 "$qemu" || die "the VM has ended"
kill "$qemu"
files >/tmp/after
diff /tmp/before /tmp/after >/tmp/rest || die "a purge leaves, or takes: $(cat /tmp/rest)"
! getent group plimsoll plimsoll-ro || die "a purge leaves groups"
[ ! -e /run/plimsoll ] || die "a purge leaves in /run/plimsoll: $(ls -A /run/plimsoll)"
