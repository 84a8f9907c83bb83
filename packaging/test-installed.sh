#!/bin/sh
# In a fresh Debian with systemd and QEMU, without a compiler: installs a .deb, lists a VM, and purges it again. Called by test.sh.
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
# pid UNIT: the process of a running service, 0 if it does not run.
pid() { systemctl show --property MainPID --value "$1"; }
# lists_vm: waits for the first VM in the list, at most two minutes after $began.
lists_vm() {
    until plimsoll vms -o csv 2>/tmp/vms.log | grep -q '^first,'; do
        [ "$(pid plimsolld)" != 0 ] || die "plimsolld does not run: $(cat /tmp/dpkg.log; systemctl status plimsolld; journalctl -n 30)"
        [ "$(($(date +%s%N) - began))" -lt 120000000000 ] \
            || die "two minutes, and no VM: $(cat /tmp/vms.log) $(journalctl -u plimsolld)"
        sleep 0.1
    done
}

systemd-run --quiet --unit vm qemu-system-x86_64 -name first -accel tcg -display none -m 64M -nodefaults \
    -object memory-backend-memfd,id=ram,size=64M,share=on -machine memory-backend=ram -qmp unix:/run/first.qmp,server=on,wait=off
vm=$(pid vm)

began=$(date +%s%N)
dpkg -i "$package" >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
systemctl is-enabled --quiet plimsolld || die "the service is not enabled"
lists_vm
say "from the package to the first VM: $((($(date +%s%N) - began) / 1000000)) ms"
changed=$(dpkg -V plimsoll) || die "files are not those of the package: $changed"

plimsoll --version >/dev/null
plimsolld --version >/dev/null
plimsoll top --once | grep -q 'mode observe' || die "the daemon does more than observe"
code=0
plimsoll doctor >/tmp/doctor.log || code=$?
grep -q userfaultfd /tmp/doctor.log || die "doctor printed, with exit code $code: $(cat /tmp/doctor.log)"
plimsoll doctor first >/tmp/doctor.log || true
grep -q first-touch /tmp/doctor.log || die "doctor printed of a VM: $(cat /tmp/doctor.log)"
commands=$(plimsoll --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]\+\) .*/\1/p' | grep -vx help)
[ "$(echo "$commands" | wc -l)" -gt 20 ] || die "the help lists: $commands"
for page in plimsoll plimsoll-report-mrc plimsolld $(echo "$commands" | sed 's/^/plimsoll-/'); do
    man -w "$page" >/dev/null || die "there is no man page of $page"
done
man plimsolld | grep -q NAME || die "the man page of plimsolld is not formatted"
for command in $commands; do
    grep -qw "$command" /usr/share/bash-completion/completions/plimsoll || die "bash does not complete $command"
done
for program in plimsoll plimsolld; do
    bash -euc ". /usr/share/bash-completion/completions/$program && complete -p $program" >/dev/null || die "no completions in bash"
    [ -s "/usr/share/zsh/vendor-completions/_$program" ] || die "no completions for zsh"
    [ -s "/usr/share/fish/vendor_completions.d/$program.fish" ] || die "no completions for fish"
done
/usr/libexec/plimsoll-vhost-user-blk --print-capabilities | grep -q block || die "the backend of vhost-user does not run"
getent group plimsoll plimsoll-ro >/dev/null || die "the groups are missing"

# A second installation is an upgrade: it starts the daemon anew, and keeps what the administrator configured.
echo 'turn_interval = "20s"' >/etc/plimsoll/plimsoll.toml.new
cat /etc/plimsoll/plimsoll.toml >>/etc/plimsoll/plimsoll.toml.new
mv /etc/plimsoll/plimsoll.toml.new /etc/plimsoll/plimsoll.toml
before=$(pid plimsolld)
began=$(date +%s%N)
dpkg -i "$package" >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
grep -q '^turn_interval = "20s"' /etc/plimsoll/plimsoll.toml || die "an upgrade overwrites the configuration"
lists_vm
[ "$(pid plimsolld)" != "$before" ] || die "an upgrade leaves the old program running"
[ "$(pid vm)" = "$vm" ] || die "an upgrade ends the VM"

dpkg -r plimsoll >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
[ "$(systemctl show --property ActiveState --value plimsolld)" = inactive ] || die "after a removal: $(systemctl status plimsolld)"
rest=$(find /proc -maxdepth 2 -name exe -lname '*/plimsoll*' 2>/dev/null)
[ -z "$rest" ] || die "processes outlive a removal: $rest"
[ -f /etc/plimsoll/plimsoll.toml ] || die "a removal removes the configuration"
# A purge right after the installation: the service runs then.
dpkg -i "$package" >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
[ "$(pid plimsolld)" != 0 ] || die "after a removal and an installation the service does not run"
dpkg -P plimsoll >/tmp/dpkg.log 2>&1 || die "$(cat /tmp/dpkg.log)"
[ "$(pid vm)" = "$vm" ] || die "the VM has ended"
systemctl stop vm
files >/tmp/after
diff /tmp/before /tmp/after >/tmp/rest || die "a purge leaves, or takes: $(cat /tmp/rest)"
! getent group plimsoll plimsoll-ro || die "a purge leaves groups"
[ ! -e /run/plimsoll ] || die "a purge leaves in /run/plimsoll: $(ls -A /run/plimsoll)"
