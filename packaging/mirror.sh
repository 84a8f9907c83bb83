# shellcheck shell=sh
# Sourced by what makes Debian roots.

# mirror: where the system's own packages come from, or MIRROR.
mirror() {
    [ -z "${MIRROR:-}" ] || {
        echo "$MIRROR"
        return 0
    }
    # shellcheck disable=SC1091 # the system's own
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    # shellcheck disable=SC2016 # apt's own words
    apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null \
        | awk -v codename="$codename" '$1 == codename { print $2; exit }'
}
