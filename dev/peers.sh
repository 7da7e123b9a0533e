#!/bin/sh
# Make an environment with the trainers that read our exports, or do nothing when that is done.
#
#   sh dev/peers.sh FOLDER      with TORCH, PEERS and BARE as pip writes them
#
# It is apart from .venv, because trainers pin their own versions of nearly everything. BARE are
# installed without what they depend on: verl and LLaMA-Factory ask for older versions of the others
# and for packages of GPUs, and their readers, which is all that is tested, need neither.
set -u

FOLDER=${1:?the folder of the environment}
PYTHON=${PYTHON:-.venv/bin/python}
TORCH=${TORCH:-torch==2.13.0}
PEERS=${PEERS:-trl==1.16.0 datasets==5.2.0 pyarrow pandas peft==0.21.2 pillow ray==2.60.0
    tensordict==0.10.0 torchdata==0.11.0 hydra-core==1.3.8 codetiming==1.4.0}
BARE=${BARE:-verl==0.9.1 llamafactory==0.9.5}
NEED_GB=4
NAME=peers

cd "$(dirname "$0")/.." || exit 1
. dev/environment.sh
begin "$TORCH $PEERS $BARE"
pip_install "$TORCH"
# shellcheck disable=SC2086  # lists of requirements
pip_install $PEERS
# shellcheck disable=SC2086
pip_install --no-deps $BARE
finish "datasets, pyarrow, trl"
