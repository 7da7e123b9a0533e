# Sourced by the scripts that make an environment apart from .venv. They set NAME (for messages),
# FOLDER, PYTHON and NEED_GB. torch goes first there, so that pip finds a CPU build where one is
# offered; pip's own configuration (PIP_INDEX_URL, pip.conf) is respected.
STAMP=$FOLDER/.installed
LOG=$FOLDER/install.log
export PIP_DISABLE_PIP_VERSION_CHECK=1

die() {
    echo "$NAME: $*" >&2
    exit 1
}

pip_install() {
    # shellcheck disable=SC2086,SC2048  # a list may have line breaks; they are not shown
    echo "$NAME: installing" $* "(log: $LOG)"
    "$FOLDER/bin/python" -m pip install --no-input "$@" >>"$LOG" 2>&1 && return
    reason=$(grep -E '^ *ERROR' "$LOG" | tail -n 1)
    die "pip could not install $*: ${reason:-no reason given}. Log: $LOG"
}

begin() {
    # Make the folder empty, or end here when the same was installed before: $1 says what.
    key=$(printf '%s\n' "$PWD" "$1" | cat - "dev/$NAME.sh" dev/environment.sh | cksum)
    [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$key" ] && exit 0
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "${free_kb:-0}" -ge $((NEED_GB * 1024 * 1024)) ] ||
        die "$NEED_GB GB of free disk space are needed, and $((${free_kb:-0} / 1024)) MB are free."
    "$PYTHON" -m venv --clear "$FOLDER" || die "$PYTHON could not make $FOLDER."
    : >"$LOG"
}

finish() {
    # Remember that all is there, when these modules can be imported.
    "$FOLDER/bin/python" -c "import $1" >>"$LOG" 2>&1 || die "$1 cannot be imported. Log: $LOG"
    echo "$key" >"$STAMP"
}
