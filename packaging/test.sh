# shellcheck shell=sh
# `./dev package test`: each package in a fresh root. Sourced by package.sh.

# fresh NAME SUITE PACKAGE...: a fresh copy of a root with these packages, as $root.
fresh() {
    base "$@"
    root=$work/fresh
    rm -rf "$root"
    cp -a --reflink=auto "$work/roots/$1" "$root"
}

# boot ROOT MOUNTS COMMAND: boots ROOT's systemd in namespaces of its own, where COMMAND, a line, runs as a service whose exit code is ours.
# MOUNTS as of `within`.
boot() {
    cat >"$1/etc/systemd/system/test.service" <<UNIT
[Unit]
Requires=basic.target
After=basic.target
SuccessAction=exit
FailureAction=exit
[Service]
Type=oneshot
Environment=LC_ALL=C.UTF-8
StandardOutput=file:/test.log
StandardError=file:/test.log
ExecStart=$3
UNIT
    code=0
    # systemd gets the part of the control groups that it runs in.
    # shellcheck disable=SC2016 # words of the inner shells
    unshare --mount --propagation private sh -euc '
        root=$1
        groups=$root/sys/fs/cgroup
        # systemd makes mount namespaces for services of what is a mount itself.
        mount --bind "$root" "$root"
        mount -t sysfs -o ro sysfs "$root/sys"
        mount -t cgroup2 cgroup2 "$groups"
        ours=$groups/plimsoll-package-test-$$
        mkdir "$ours"
        code=0
        sh -euc '\''
            echo $$ >"$2/cgroup.procs"
            exec unshare --mount --pid --cgroup --ipc --uts --fork sh -euc "$4" sh "$1" "$3"
        '\'' sh "$root" "$ours" "$2" "$3" </dev/null || code=$?
        find "$ours" -depth -type d -exec rmdir {} +
        exit "$code"
    ' sh "$1" "$2" '
        umount "$1/sys/fs/cgroup"
        mount -t cgroup2 cgroup2 "$1/sys/fs/cgroup"
        mount -t proc proc "$1/proc"
        mount --rbind /dev "$1/dev"
        mount -t tmpfs tmpfs "$1/run"
        mount -t tmpfs tmpfs "$1/tmp"
        echo "$2" | while read -r from to how; do
            [ -n "$from" ] || continue
            mkdir -p "$1$to"
            mount --bind "$from" "$1$to"
            [ "$how" != ro ] || mount -o remount,bind,ro "$1$to"
        done
        exec chroot "$1" env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --unit=test.service \
            --show-status=false --log-target=null
    ' || code=$?
    cat "$1/test.log" >&2 || true
    return "$code"
}

# test_deb SUITE: from the package to the first list of VMs beside a running QEMU, and to the purge that leaves nothing.
test_deb() {
    say "the deb in a fresh Debian ($1)"
    fresh "$1-systemd" "$1" man-db qemu-system-x86 systemd systemd-sysv
    boot "$root" "$out /packages ro
$PWD/packaging /packaging ro" "/bin/sh /packaging/test-installed.sh /packages/$(basename "$deb")" || die "the deb fails in $1"
}

# What linters find in packages. There is no address of mail, and `plimsoll-vhost-user-blk` is for management software, not for people.
lint() {
    say "linters of packages"
    lintian --fail-on error,warning --suppress-tags malformed-contact,bogus-mail-host-in-debian-changelog,no-manual-page,unusual-interpreter "$deb" \
        || die "lintian complains"
    rpmlint --config packaging/rpm/rpmlint.toml "$rpm" >"$work/rpm/lint" 2>&1 || true
    grep -q ' 0 errors, 0 warnings' "$work/rpm/lint" || die "rpmlint complains: $(cat "$work/rpm/lint")"
}

test_rpm() {
    say "the rpm in a root of its own"
    rpm -qlp "$rpm" >"$work/rpm/listed"
    for file in /usr/bin/plimsoll /usr/bin/plimsolld /usr/lib/systemd/system/plimsolld.service /etc/plimsoll/plimsoll.toml \
        /usr/share/man/man1/plimsoll-vms.1.gz /usr/share/man/man8/plimsolld.8.gz /usr/share/zsh/site-functions/_plimsoll; do
        grep -qx "$file" "$work/rpm/listed" || die "$file is not in the rpm"
    done
    [ "$(rpm -qcp "$rpm")" = /etc/plimsoll/plimsoll.toml ] || die "the configuration is no configuration file"
    fresh "$oldest-build" "$oldest" gcc libc6-dev
    # The root is no Fedora, so its database names none of what the package requires. Scripts run within the root.
    rpm --root "$root" --dbpath /var/lib/rpm --nodeps -i "$rpm" || die "the rpm cannot be installed"
    within "$root" '' sh -euc 'plimsoll --version && plimsolld --check-config && getent group plimsoll plimsoll-ro' >/dev/null
    rpm --root "$root" --dbpath /var/lib/rpm -e plimsoll || die "the rpm cannot be removed"
    rest=$(find "$root" -xdev -name '*plimsoll*')
    [ -z "$rest" ] || die "the rpm leaves $rest"
}

test_tarball() {
    say "the tarball in an empty root"
    root=$work/fresh
    rm -rf "$root"
    mkdir -p "$root/usr/local"
    tar -C "$root/usr/local" --strip-components=1 -xf "$tarball"
    for program in plimsoll plimsolld; do
        # ldd(1) fails for what needs no loader, or prints that it is static.
        ! ldd "$root/usr/local/bin/$program" 2>/dev/null | grep -q '=>' || die "$program needs libraries"
        chroot "$root" "/usr/local/bin/$program" --version >/dev/null || die "$program does not run"
    done
    grep -qx 'ExecStart=/usr/local/bin/plimsolld' "$root/usr/local/lib/systemd/system/plimsolld.service" \
        || die "the unit names other programs"
    ! find "$root" -xtype l | grep . || die "links lead nowhere"
}

test_image() {
    say "the image, unpacked"
    rm -rf "$work/image/layout-2" "$work/image/bundle"
    skopeo copy -q "oci-archive:$image" "oci:$work/image/layout-2:tested"
    umoci unpack --image "$work/image/layout-2:tested" "$work/image/bundle"
    entrypoint=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["config"]["Entrypoint"][0])' <<CONFIG
$(skopeo inspect --config "oci-archive:$image")
CONFIG
)
    chroot "$work/image/bundle/rootfs" "$entrypoint" --version >/dev/null || die "the image's entry point does not run"
}

# test_chart: what Helm makes of the chart, against the schemas of Kubernetes (the kinds of the Prometheus operator have none there), and
# the image's daemon with the configuration that it makes. After test_image.
test_chart() {
    say "the chart"
    helm=$work/tools/helm
    if [ ! -x "$helm" ]; then
        command -v go >/dev/null || die "building Helm needs Go 1.24 or later"
        GOBIN=$work/tools nice go install helm.sh/helm/v3/cmd/helm@v3.22.0
    fi
    [ -x "$work/tools/venv/bin/kubernetes-validate" ] || {
        python3 -m venv "$work/tools/venv"
        "$work/tools/venv/bin/pip" -q install kubernetes-validate==1.37.0
    }
    # A Helm that was built this way takes itself for one of Kubernetes 1.20.
    kubernetes=$(sed -n 's/^kubeVersion: ">=\(.*\)-0"$/\1/p' packaging/helm/plimsoll/Chart.yaml)
    "$helm" lint --strict --quiet --kube-version "$kubernetes" "$chart" || die "helm lint complains"
    for values in '' 'serviceMonitor.enabled=true,prometheusRule.enabled=true,users={107,root}' 'privileged=false,port=9000' \
        'token.existingSecret=mine,persistence.enabled=false,config=mode\ =\ \"advise\"'; do
        "$helm" template plimsoll "$chart" --kube-version "$kubernetes" --namespace plimsoll --set "$values" >"$work/chart.yaml" \
            || die "the chart with '$values' is not rendered"
        # shellcheck disable=SC2016 # words of the inner shell
        unshare --net --mount --propagation private sh -euc '
            ip link set lo up
            mount --bind "$1" "$1"
            mkdir -p "$1/proc"
            mount -t proc proc "$1/proc"
            shift
            exec "$@"
        ' sh "$work/image/bundle/rootfs" "$work/tools/venv/bin/python" packaging/test-chart.py "$work/chart.yaml" \
            "$work/image/bundle/rootfs" "$entrypoint" packaging/systemd/plimsolld.service || die "the chart with '$values' is not valid"
    done
    for wrong in prot=1 port=0 users=root serviceMonitor.scheme=ftp; do
        ! "$helm" template plimsoll "$chart" --kube-version "$kubernetes" --set "$wrong" >/dev/null 2>&1 || die "the chart takes $wrong"
    done
}

[ "$(id -u)" = 0 ] || die "only root can test packages"
for package in "$deb" "$rpm" "$tarball" "$image" "$chart"; do
    [ -f "$package" ] || die "$package is missing: ./dev package makes it"
done
lint
test_deb bookworm
test_deb trixie
test_rpm
test_tarball
test_image
test_chart
rm -rf "$work/fresh"
say "all packages passed"
