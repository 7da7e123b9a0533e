#!/bin/sh
# Make .venv and install coa into it, or do nothing when that is done already.
#
# torch goes first and pinned: pip then finds a CPU build where one is offered, instead of several
# gigabytes of CUDA. The stamp holds a checksum of what decides the installation, and the place,
# since a virtual environment cannot be moved. pip's own configuration (PIP_INDEX_URL, pip.conf) is
# respected. A missing prerequisite is one line.
set -u

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
EXTRAS=${EXTRAS:-train,tools,export,serve,mcp,dev}
VENV=.venv
STAMP=$VENV/.installed
LOG=$VENV/install.log
NEED_GB=6
RETRY="To try again: rm $STAMP && make setup"
UNREACHABLE='ConnectionError|Max retries|ConnectTimeout|ReadTimeout|ProxyError|SSLError'

die() {
    echo "setup: $*" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    # A PYTHON that was asked for by name is used or refused, never replaced.
    if [ "$PYTHON" = python3 ]; then
        candidates="python3 python3.13 python3.12 python3.11"
    else
        candidates=$PYTHON
    fi
    for candidate in $candidates; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    found=$("$PYTHON" -V 2>/dev/null) || found="no program that runs"
    die "Python 3.11 or newer is needed, and $PYTHON is ${found:-no program that runs}." \
        "Install one, or name it: make run PYTHON=/path/to/python3.11"
}

check_disk() {
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    if [ "${free_kb:-0}" -lt $((NEED_GB * 1024 * 1024)) ]; then
        die "$NEED_GB GB of free disk space are needed here, and $((${free_kb:-0} / 1024)) MB are" \
            "free. Free some, or put the project on another disk."
    fi
}

make_venv() {
    python=$(find_python) || exit 1
    if ! output=$("$python" -m venv --clear $VENV 2>&1); then
        rm -rf $VENV
        case $output in
        *ensurepip* | *"No module named"*)
            die "$python cannot make a virtual environment (its venv module is missing)." \
                "Install it (Debian, Ubuntu: apt install python3-venv), or set PYTHON." ;;
        *)
            die "$python could not make $VENV: $(echo "$output" | tail -n 1)" ;;
        esac
    fi
}

pip_install() {
    # $1 is what the step is called; the rest goes to pip.
    what=$1
    shift
    echo "setup: installing $what (log: $LOG)"
    echo "== pip install $*" >>$LOG
    if $VENV/bin/python -m pip install --no-input "$@" >>$LOG 2>&1; then
        return
    fi
    if grep -qE 'No space left|Errno 28' $LOG; then
        die "the disk is full. Free some space and run the same command again. Log: $LOG"
    elif grep -qE "$UNREACHABLE" $LOG; then
        die "the package index cannot be reached, so $what cannot be installed. Check the" \
            "network, or point pip at an index you can reach (PIP_INDEX_URL). Log: $LOG"
    fi
    reason=$(grep -E '^ *ERROR' $LOG | tail -n 1)
    die "pip could not install $what: ${reason:-no reason given}. Log: $LOG"
}

install_gym() {
    # Two dependencies of the task generators are built from source. Without a C compiler all else
    # works, so that this is a line and no end.
    echo "setup: installing the task generators of reasoning-gym (log: $LOG)"
    $VENV/bin/python -m pip install --no-input -e ".[gym]" >>$LOG 2>&1 ||
        echo "setup: they cannot be installed (see $LOG), so there are no gym-code tasks. $RETRY"
}

find_bubblewrap() {
    # The sandbox for programs that a model writes. Without it such programs are refused.
    [ "$(uname)" = Linux ] && ! command -v bwrap >/dev/null 2>&1 || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "setup: installing bubblewrap, the sandbox for programs, with apt-get (log: $LOG)"
        { apt-get install -y bubblewrap || { apt-get update && apt-get install -y bubblewrap; }; } \
            >>$LOG 2>&1 </dev/null && return 0
    fi
    echo "setup: bubblewrap is missing, so programs of a model are refused or less confined." \
        "Install it: apt install bubblewrap. See docs/security.md. $RETRY"
}

cd "$(dirname "$0")/.." || exit 1
key=$(printf '%s\n' "$PWD" "$TORCH" "$EXTRAS" "${NO_GYM:-}" | cat - pyproject.toml dev/setup.sh | cksum)
[ -f $STAMP ] && [ "$(cat $STAMP)" = "$key" ] && exit 0

if ! new_enough $VENV/bin/python || ! $VENV/bin/python -m pip --version >/dev/null 2>&1; then
    check_disk
    make_venv
fi
rm -f $STAMP
: >$LOG
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip_install torch "$TORCH"
: >$LOG
pip_install "coa and what it needs" -e ".[$EXTRAS]"
[ -n "${NO_GYM:-}" ] || install_gym
find_bubblewrap
echo "$key" >$STAMP
