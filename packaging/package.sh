#!/bin/sh
# Packages of Plimsoll, from one tree of files, in target/package/out: `./dev package [deb|rpm|tarball|image|chart]...`, all
# of them by default; `test` installs and runs them in fresh roots. Everything is built in a fresh Debian 12, whose glibc is the
# oldest that the packages run on; the tarball and the image are static and need none.
set -eu

cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
machine=$(uname -m)
triple=$machine-unknown-linux-gnu
work=$PWD/target/package
out=$work/out
# The suite in which packages are built.
oldest=bookworm
# Files in packages are as old as the commit they are made from.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
case $machine in
x86_64) deb_architecture=amd64 image_architecture=amd64 ;;
aarch64) deb_architecture=arm64 image_architecture=arm64 ;;
*) deb_architecture=$machine image_architecture=$machine ;;
esac
deb=$out/plimsoll_${version}_$deb_architecture.deb
rpm=$out/plimsoll-$version-1.$machine.rpm
tarball=$out/plimsoll-$version-$machine-linux.tar.gz
image=$out/plimsoll-$version-$machine-oci.tar
chart=$out/plimsoll-$version.tgz

say() { printf '    %s\n' "$*" >&2; }
die() {
    printf 'package: %s\n' "$*" >&2
    exit 1
}

# ---- roots

# shellcheck source=packaging/mirror.sh
. packaging/mirror.sh

# base NAME SUITE PACKAGE...: a minimal Debian with these packages, in $work/roots/NAME; made once.
base() {
    base=$work/roots/$1
    [ ! -d "$base" ] || return 0
    [ "$(id -u)" = 0 ] || die "only root can make $base (debootstrap)"
    name=$1
    suite=$2
    shift 2
    say "making a Debian ($suite) in ${base#"$PWD/"}"
    from=$(mirror)
    [ -n "$from" ] || die "no mirror of Debian is known: set MIRROR"
    rm -rf "$base.part"
    mkdir -p "$base.part"
    {
        debootstrap --variant=minbase "$suite" "$base.part" "$from"
        # shellcheck disable=SC2016 # words of the inner shell
        within "$base.part" '' sh -euc 'apt-get update -q
            DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
            apt-get clean
            rm -rf /var/lib/apt/lists/*' sh "$@"
    } >"$work/roots/$name.log" 2>&1 || die "no Debian ($suite): $(tail -n 3 "$work/roots/$name.log")"
    mv "$base.part" "$base"
}

# within ROOT MOUNTS COMMAND...: runs it with ROOT as /, with /proc, /dev and directories of MOUNTS, lines of `FROM TO [ro]`.
# What is mounted disappears with it.
within() {
    # shellcheck disable=SC2016 # words of the inner shell
    unshare --mount --pid --fork --propagation private sh -euc '
        root=$1
        echo "$2" | while read -r from to how; do
            [ -n "$from" ] || continue
            mkdir -p "$root$to"
            mount --bind "$from" "$root$to"
            [ "$how" != ro ] || mount -o remount,bind,ro "$root$to"
        done
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/run"
        mount -t tmpfs tmpfs "$root/tmp"
        shift 2
        exec chroot "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 "$@"
    ' sh "$@"
}

# ---- programs

# programs dynamic|static: builds both programs into $work/KIND. Paths within the root are the same everywhere, and so are the programs.
programs() {
    kind=$1
    built=$work/$kind/$triple/release
    case " ${built_before:-} " in *" $kind "*) return 0 ;; esac
    base "$oldest-build" "$oldest" gcc libc6-dev
    cargo fetch -q --locked
    say "building the $kind programs"
    flags=
    [ "$kind" = dynamic ] || flags='-C target-feature=+crt-static'
    mkdir -p "$work/$kind"
    within "$work/roots/$oldest-build" "$PWD /src ro
${CARGO_HOME:-$HOME/.cargo} /cargo
$(rustc --print sysroot) /rust ro
$work/$kind /target" env PATH=/rust/bin:/usr/bin:/bin CARGO_HOME=/cargo CARGO_NET_OFFLINE=true RUSTFLAGS="$flags" \
        CARGO_BUILD_JOBS="${CARGO_BUILD_JOBS:-$(nproc)}" \
        cargo build -q --locked --release --manifest-path /src/Cargo.toml --target "$triple" --target-dir /target \
        -p plimsoll -p plimsoll-daemon
    built_before="${built_before:-} $kind"
    if [ "$kind" = static ]; then
        for program in plimsoll plimsolld; do
            ! readelf -d "$built/$program" | grep -q '(NEEDED)' || die "$program is not static"
        done
        return 0
    fi
    needed=$(readelf -d "$built/plimsoll" "$built/plimsolld" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u)
    for library in $needed; do
        case $library in
        libc.so.6 | libm.so.6 | libgcc_s.so.1 | ld-linux-*) ;;
        *) die "the programs need $library, which no package depends on" ;;
        esac
    done
    # The newest version of a symbol of glibc that they use.
    glibc=$(readelf -V "$built/plimsoll" "$built/plimsolld" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -n 1)
}

# ---- the tree

# tree KIND PREFIX TO: all files of Plimsoll under TO, for programs installed in PREFIX (/usr or /usr/local).
tree() {
    kind=$1
    prefix=$2
    to=$3
    programs "$kind"
    rm -rf "$to"
    at=$to$prefix
    mkdir -p "$at/libexec" "$to/etc/plimsoll/plimsoll.toml.d"
    install -D -m 755 -s -t "$at/bin" "$built/plimsoll" "$built/plimsolld"
    # Management software starts backends of vhost-user by a name.
    ln -s ../bin/plimsoll "$at/libexec/plimsoll-vhost-user-blk"
    install -D -m 644 -t "$at/share/qemu/vhost-user" packaging/50-plimsoll-blk.json
    install -D -m 644 -t "$at/lib/systemd/system" packaging/systemd/plimsolld.service
    install -D -m 644 -t "$at/lib/sysusers.d" packaging/sysusers.d/plimsoll.conf
    install -D -m 644 -t "$at/lib/tmpfiles.d" packaging/tmpfiles.d/plimsoll.conf
    install -D -m 644 -t "$to/etc/plimsoll" packaging/plimsoll.toml
    install -D -m 644 -t "$at/share/plimsoll/prometheus" packaging/prometheus/*.yml
    install -D -m 644 -t "$at/share/plimsoll/grafana" packaging/grafana/plimsoll.json
    find contrib -type f | while read -r file; do
        install -D -m "$([ -x "$file" ] && echo 755 || echo 644)" "$file" "$at/share/plimsoll/$file"
    done
    # Beside each other as here, so that links lead to each other, and to the repository where a package has no such file.
    install -D -m 644 -t "$at/share/doc/plimsoll" README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT
    find docs -type f ! -name '*.py' | while read -r page; do
        install -D -m 644 "$page" "$at/share/doc/plimsoll/$page"
    done
    repository=https://github.com/plimsoll-vm/plimsoll/blob/main
    absent='((contrib|crates|guest|lab|packaging|python|qemu|web)[/)]|(CONTRIBUTING|ARCHITECTURE)\.md)'
    find "$at/share/doc/plimsoll" -name '*.md' -exec sed -E -i "s#\]\((\.\./)*$absent#]($repository/\2#g" {} +
    sed -i "s|/usr/bin/|$prefix/bin/|" "$at/lib/systemd/system/plimsolld.service"
    sed -i "s|/usr/libexec/|$prefix/libexec/|" "$at/share/qemu/vhost-user/50-plimsoll-blk.json"

    generated=$work/generated
    rm -rf "$generated"
    "$at/bin/plimsoll" generate man "$generated" >/dev/null
    "$at/bin/plimsoll" generate completions "$generated" >/dev/null
    "$at/bin/plimsolld" --generate "$generated"
    gzip -9n "$generated"/*.[18]
    install -D -m 644 -t "$at/share/man/man1" "$generated"/*.1.gz
    install -D -m 644 -t "$at/share/man/man8" "$generated"/*.8.gz
    for program in plimsoll plimsolld; do
        install -D -m 644 "$generated/$program.bash" "$at/share/bash-completion/completions/$program"
        install -D -m 644 -t "$at/share/zsh/vendor-completions" "$generated/_$program"
        install -D -m 644 -t "$at/share/fish/vendor_completions.d" "$generated/$program.fish"
    done
    find "$to" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
}

# made FILE: prints its name and size.
made() {
    say "${1#"$PWD/"}: $(du -h --apparent-size "$1" | cut -f 1)"
}

# ---- packages

make_deb() {
    root=$work/deb
    tree dynamic /usr "$root"
    # Debian's own names. There is no address of mail: the project takes issues.
    maintainer='The Plimsoll authors <https://github.com/plimsoll-vm/plimsoll>'
    doc=$root/usr/share/doc/plimsoll
    {
        cat <<'COPYRIGHT'
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: Plimsoll
Source: https://github.com/plimsoll-vm/plimsoll

Files: *
Copyright: 2026 The Plimsoll authors
License: Apache-2.0 or Expat
 The full texts are in LICENSE-APACHE and LICENSE-MIT beside this file.
COPYRIGHT
    } >"$doc/copyright"
    gzip -9n <<CHANGELOG >"$doc/changelog.gz"
plimsoll ($version) unstable; urgency=medium

  * CHANGELOG.md beside this file lists what changed.

 -- $maintainer  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
CHANGELOG
    mkdir "$root/DEBIAN"
    for script in postinst prerm postrm; do
        install -m 755 "packaging/deb/$script" "$root/DEBIAN/$script"
    done
    echo /etc/plimsoll/plimsoll.toml >"$root/DEBIAN/conffiles"
    cat >"$root/DEBIAN/control" <<CONTROL
Package: plimsoll
Version: $version
Architecture: $deb_architecture
Maintainer: $maintainer
Installed-Size: $(du -k -s --apparent-size "$root/usr" "$root/etc" | awk '{ all += $1 } END { print all }')
Depends: libc6 (>= $glibc), libgcc-s1
Recommends: libvirt-clients
Suggests: qemu-system, prometheus
Section: admin
Priority: optional
Homepage: https://github.com/plimsoll-vm/plimsoll
Description: memory that each VM of a KVM host needs, measured from outside
 Plimsoll traces the VMs of a KVM/QEMU host from outside, keeps a miss-ratio
 curve of each, and moves memory to where it saves the most misses. Its daemon
 only observes until configured otherwise.
CONTROL
    (cd "$root" && find usr -type f -exec md5sum {} + | LC_ALL=C sort -k 2 >DEBIAN/md5sums)
    find "$root" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Zxz --build "$root" "$deb" >/dev/null
    made "$deb"
}

make_rpm() {
    root=$work/rpm/tree
    tree dynamic /usr "$root"
    # zsh looks there on Fedora.
    mv "$root/usr/share/zsh/vendor-completions" "$root/usr/share/zsh/site-functions"
    list=$work/rpm/list
    (
        cd "$root"
        echo '%dir %attr(0755, root, root) /etc/plimsoll'
        echo '%dir %attr(0755, root, root) /etc/plimsoll/plimsoll.toml.d'
        echo '%config(noreplace) /etc/plimsoll/plimsoll.toml'
        find usr/share/plimsoll usr/share/doc/plimsoll -type d | LC_ALL=C sort | sed 's|^|%dir /|'
        find usr \( -type f -o -type l \) | LC_ALL=C sort | while read -r file; do
            case $file in
            usr/share/man/*) echo "%doc /$file" ;;
            usr/share/doc/*/LICENSE*) echo "%license /$file" ;;
            usr/share/doc/*) echo "%doc /$file" ;;
            *) echo "/$file" ;;
            esac
        done
    ) >"$list"
    # What rpm keeps by itself stays under target.
    rpmbuild -bb --quiet --target "$machine" \
        --define "_topdir $work/rpm/build" --define "_dbpath $work/rpm/db" --define "_rpmdir $out" \
        --define "_rpmfilename %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm" --define "_build_id_links none" \
        --define "source_date_epoch_from_changelog 0" --define "use_source_date_epoch_as_buildtime 1" \
        --define "clamp_mtime_to_source_date_epoch 1" --define "_buildhost localhost" \
        --define "version $version" --define "tree $root" --define "list $list" \
        --define "requires libc.so.6(GLIBC_$glibc)(64bit) libgcc_s.so.1()(64bit)" \
        packaging/rpm/plimsoll.spec >"$work/rpm/log" 2>&1 || die "no rpm: $(tail -n 5 "$work/rpm/log")"
    made "$rpm"
}

make_tarball() {
    name=$(basename "$tarball" .tar.gz)
    root=$work/tarball
    tree static /usr/local "$root"
    mv "$root/usr/local/share/zsh/vendor-completions" "$root/usr/local/share/zsh/site-functions"
    # Configuration beside the rest: nothing overwrites the one in /etc.
    mkdir -p "$root/usr/local/share/plimsoll"
    mv "$root/etc/plimsoll/plimsoll.toml" "$root/usr/local/share/plimsoll/"
    touch -h -d "@$SOURCE_DATE_EPOCH" "$root/usr/local/share/plimsoll"
    tar -C "$root/usr/local" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
        --transform "s|^\.|$name|S" -cf - . | gzip -9n >"$tarball"
    made "$tarball"
}

make_image() {
    root=$work/image/tree
    tree static /usr "$root"
    rm -rf "$root/usr/lib" "$root/usr/libexec" "$root/usr/share"
    # Names of users whose processes can be VMs: KubeVirt's is 107.
    mkdir -p "$root/run/plimsoll" "$root/tmp" "$root/var/lib/plimsoll"
    chmod 1777 "$root/tmp"
    printf '%s\n' root:x:0:0:root:/:/bin/false qemu:x:107:107:qemu:/:/bin/false >"$root/etc/passwd"
    printf '%s\n' root:x:0: qemu:x:107: >"$root/etc/group"
    find "$root" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    layout=$work/image/layout
    rm -rf "$layout"
    created=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
    umoci init --layout "$layout"
    umoci new --image "$layout:$version"
    umoci insert --image "$layout:$version" --history.created "$created" "$root" / >/dev/null
    umoci config --image "$layout:$version" --created "$created" --history.created "$created" \
        --architecture "$image_architecture" --os linux \
        --config.entrypoint /usr/bin/plimsolld --config.env PATH=/usr/bin --config.exposedports 7373/tcp \
        --config.label org.opencontainers.image.title=plimsoll --config.label "org.opencontainers.image.version=$version" \
        --config.label org.opencontainers.image.licenses="Apache-2.0 OR MIT" \
        --config.label org.opencontainers.image.source=https://github.com/plimsoll-vm/plimsoll
    umoci gc --layout "$layout" >/dev/null
    rm -f "$image"
    skopeo copy -q "oci:$layout:$version" "oci-archive:$image:plimsoll:$version"
    made "$image"
}

make_chart() {
    # A chart's version is Plimsoll's.
    for key in version appVersion; do
        grep -q "^$key: \"\?$version\"\?$" packaging/helm/plimsoll/Chart.yaml || die "$key of Chart.yaml is not $version"
    done
    tar -h -C packaging/helm --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf - plimsoll \
        | gzip -9n >"$chart"
    made "$chart"
}

mkdir -p "$out"
[ $# -gt 0 ] || set -- deb rpm tarball image chart
for format; do
    case $format in
    deb | rpm | tarball | image | chart) "make_$format" ;;
    test)
        # shellcheck source=packaging/test.sh
        . packaging/test.sh
        ;;
    *) die "there is no package \"$format\"" ;;
    esac
done
