# shellcheck shell=bash
# Shared by the image recipes (sourced, not run): messages, the cache, and unpacking Debian packages.
#
# The rules:
# * Progress and errors go to stderr; the only thing on stdout is the folder with the result.
# * A result lies under ${LAMINA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lamina}/NAME-KEY, where KEY is a digest of the
#   recipe's own files and options: a changed recipe builds anew, an unchanged one is reused.
# * A result is built in a temporary folder and renamed when complete, under a lock: a killed or a concurrent build never
#   leaves a half-made result behind.
# * Packages come from the mirror the host's own apt configuration names (else the one mmdebstrap does), or from $LAMINA_MIRROR. Nothing is installed on the
#   host and no package script runs: packages are only unpacked.

# With it, `cd` may print where it goes, and go elsewhere.
unset CDPATH

recipe=$(basename -- "$0")
images=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
suite=trixie

say() { printf 'images/%s: %s\n' "$recipe" "$*" >&2; }

die() {
    printf 'images/%s: error: %s\n' "$recipe" "$1" >&2
    shift
    local line
    for line in "$@"; do printf '    %s\n' "$line" >&2; done
    exit 1
}

# Whatever ends a recipe says so.
work=
failed() {
    # What fails in a subshell fails in this one, too, if it counts.
    [ "$BASH_SUBSHELL" = 0 ] || return 0
    say "error: line $2 of ${1##*/} failed: $3"
    [ -z "$work" ] || [ ! -s "$work/log" ] || tail -n 5 -- "$work/log" >&2
}
set -E
trap 'failed "${BASH_SOURCE[0]}" "$LINENO" "$BASH_COMMAND"' ERR

# need COMMAND PACKAGE: refuses to go on without a command, naming the package that has it.
need() {
    command -v "$1" >/dev/null || die "'$1' is missing" "install it with: apt-get install $2"
}

# options ARGUMENT...: understands --help and --refresh.
options() {
    local argument
    refresh=
    for argument in "$@"; do
        case $argument in
        -h | --help)
            usage
            exit
            ;;
        --refresh) refresh=yes ;;
        *)
            usage >&2
            die "no such option: $argument"
            ;;
        esac
    done
}

# provide NAME FUNCTION: prints the folder of the result NAME; unless it is in the cache, FUNCTION fills $work/out.
provide() {
    local name=$1 function=$2 cache key
    need flock util-linux
    cache=${LAMINA_CACHE:-${XDG_CACHE_HOME:-${HOME:?is not set, and neither is LAMINA_CACHE}/.cache}/lamina}
    cache=$(realpath -m -- "$cache")
    # Loaders' and preloads' lists are split at these, and make takes no spaces.
    [[ $cache != *[[:space:]:\;]* ]] ||
        die "the path of the cache folder '$cache' has a space, a colon or a semicolon" "set LAMINA_CACHE to a folder without"
    local parts=("$images/lib.sh" "$images/$recipe")
    [ ! -d "$images/$recipe.d" ] || parts+=("$images/$recipe.d"/*)
    key=$(cat -- "${parts[@]}" | sha256sum | cut -c1-12)
    result=$cache/$name-$key
    mkdir -p -- "$cache" || die "cannot make the cache folder $cache" "set LAMINA_CACHE to a folder that can be written"
    if [ -e "$result/complete" ] && [ -z "$refresh" ]; then
        say "using $result"
    else
        build "$function"
    fi
    printf '%s\n' "$result"
}

# build FUNCTION: runs FUNCTION with an empty folder $work/out, then renames that to $result; one build at a time.
build() {
    local started=$SECONDS asked
    asked=$(date +%s)
    exec 9>"$result.lock"
    if ! flock --nonblock 9; then
        say "another build of the same is running, waiting for it"
        flock 9
        # Its result is as fresh as ours would be.
        if [ -e "$result/complete" ] && [ "$(stat -c %Y -- "$result/complete")" -ge "$asked" ]; then return; fi
    fi
    if [ -e "$result/complete" ] && [ -z "$refresh" ]; then return; fi
    # What an earlier build left that was killed; the lock says that none is running.
    rm -rf -- "$result".build.*
    room
    work=$(mktemp -d -- "$result.build.XXXXXX")
    trap 'rm -rf -- "$work"' EXIT
    trap 'exit 130' INT TERM HUP
    mkdir -- "$work/out"
    "$function"
    touch -- "$work/out/complete"
    if [ -e "$result" ]; then mv -T -- "$result" "$work/old"; fi
    mv -T -- "$work/out" "$result"
    say "done in $((SECONDS - started)) s"
}

# Refuses to start a build that would fill the disk: packages, what they unpack to, and the result.
room() {
    local free
    free=$(($(df -Pk -- "$cache" | awk 'NR == 2 { print $4 }') / 1024))
    [ "$free" -ge "$needs_mib" ] || die "only $free MiB are free where $cache is, building needs $needs_mib MiB" \
        "make room, or set LAMINA_CACHE to a folder on another disk"
}

# Sets $mirror: LAMINA_MIRROR, or the Debian archive that the host's apt uses, or mmdebstrap by itself.
find_mirror() {
    mirror=${LAMINA_MIRROR:-}
    if [ -z "$mirror" ]; then
        command -v apt-get >/dev/null ||
            die "this host has no apt, so no mirror is configured" "set LAMINA_MIRROR to the address of a Debian mirror"
        # Origin and label are known once apt's lists were fetched; before that the address has to do.
        mirror=$(apt-get indextargets --format "\$(ORIGIN)|\$(LABEL)|\$(REPO_URI)" 'Created-By: Packages' |
            awk -F'|' '$1 == "Debian" && $2 == "Debian" && !found { print $3; found = 1 }')
        if [ -z "$mirror" ]; then
            mirror=$(apt-get --print-uris -o Debug::NoLocking=1 update 2>/dev/null |
                awk -F"'" '$2 ~ /\/debian\/+dists\// && !found { sub(/\/+dists\/.*/, "", $2); print $2; found = 1 }') || true
        fi
    fi
    # The images are made of Debian's packages, whatever the host is, and mmdebstrap knows where those are for everybody.
    if [ -z "$mirror" ] && command -v mmdebstrap >/dev/null; then
        mirror=$(sed -n "s/^ *my \$mirror *= '\(http[^']*\)';\$/\1/p" "$(command -v mmdebstrap)" | head -n 1)
    fi
    [ -n "$mirror" ] || die "no Debian mirror is known here" \
        "set LAMINA_MIRROR to the address of a Debian mirror, as in a 'deb' line"
    mirror=${mirror%/}
    if [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
        die "the keys that Debian signs its packages with are missing" "install them with: apt-get install debian-archive-keyring"
    fi
}

# unpack SUITES FOLDER ARGUMENT...: makes FOLDER from Debian packages with mmdebstrap; ARGUMENTs are its further options.
unpack() {
    local suites=$1 folder=$2 one mode=chrootless lines=()
    shift 2
    need mmdebstrap mmdebstrap
    find_mirror
    for one in $suites; do lines+=("deb $mirror $one main"); done
    # Unpacking alone needs no chroot and no privileges; mmdebstrap only insists on its root mode when run as root.
    [ "$(id -u)" = 0 ] && mode=root
    mkdir -p -- "$folder"
    say "fetching packages of Debian $suites"
    if ! mmdebstrap --mode="$mode" --format=tar --architectures=amd64 --skip=output/dev \
        --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Retries "3"' \
        --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
        "$@" "$suite" - "${lines[@]}" 2>"$work/log" | tar -x -C "$folder" --no-same-owner 2>>"$work/log"; then
        grep -v '^I: ' "$work/log" | tail -n 20 >&2 || true
        die "mmdebstrap could not fetch or unpack the packages (its messages are above)" \
            "is the mirror reachable, and does it carry Debian $suites?" \
            "does /usr/share/keyrings/debian-archive-keyring.gpg know Debian $suite? (package debian-archive-keyring)"
    fi
}
