#!/bin/sh
# Make an environment with the trainers that read our exports, or do nothing when that is done.
#
#   sh dev/peers.sh FOLDER      with TORCH, PEERS and BARE as pip writes them
#
# It is apart from .venv, because trainers pin their own versions of nearly everything. torch goes
# first, so that pip finds a CPU build where one is offered. BARE are installed without what they
# depend on: verl and LLaMA-Factory ask for older versions of the others and for packages of GPUs,
# and their readers, which is all that is tested, need neither. pip's own configuration
# (PIP_INDEX_URL, pip.conf) is respected.
set -u

FOLDER=${1:?the folder of the environment}
PYTHON=${PYTHON:-.venv/bin/python}
TORCH=${TORCH:-torch==2.13.0}
PEERS=${PEERS:-trl==1.16.0 datasets==5.2.0 pyarrow pandas peft==0.21.2 pillow ray==2.60.0
    tensordict==0.10.0 torchdata==0.11.0 hydra-core==1.3.8 codetiming==1.4.0}
BARE=${BARE:-verl==0.9.1 llamafactory==0.9.5}
NEED_GB=4

die() {
    echo "peers: $*" >&2
    exit 1
}

pip_install() {
    echo "peers: installing $(echo "$*" | tr -s ' \n' ' ') (log: $LOG)"
    "$FOLDER/bin/python" -m pip install --no-input "$@" >>"$LOG" 2>&1 && return
    reason=$(grep -E '^ *ERROR' "$LOG" | tail -n 1)
    die "pip could not install $*: ${reason:-no reason given}. Log: $LOG"
}

cd "$(dirname "$0")/.." || exit 1
STAMP=$FOLDER/.installed
LOG=$FOLDER/install.log
key=$(printf '%s\n' "$PWD" "$TORCH" "$PEERS" "$BARE" | cat - dev/peers.sh | cksum)
[ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$key" ] && exit 0

free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
[ "${free_kb:-0}" -ge $((NEED_GB * 1024 * 1024)) ] ||
    die "$NEED_GB GB of free disk space are needed, and $((${free_kb:-0} / 1024)) MB are free."
"$PYTHON" -m venv --clear "$FOLDER" || die "$PYTHON could not make $FOLDER."
: >"$LOG"
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip_install "$TORCH"
# shellcheck disable=SC2086  # lists of requirements
pip_install $PEERS
# shellcheck disable=SC2086
pip_install --no-deps $BARE
"$FOLDER/bin/python" -c 'import datasets, pyarrow, trl' >>"$LOG" 2>&1 ||
    die "TRL cannot be imported. Log: $LOG"
echo "$key" >"$STAMP"
