#!/bin/sh
# Make a folder with MCP servers that others wrote, for tests, or do nothing when that is done.
#
#   sh dev/mcp.sh FOLDER
#
#     bin   of PyPI: time and git, over stdio (40 MB)
#     npm   of npm: everything, over streamable HTTP, and filesystem, over stdio (60 MB)
#
# They are apart from .venv, because servers pin their own versions of the protocol's SDK.
set -u

FOLDER=${1:?the folder of the servers}
NAME=mcp
NEED_GB=1
PYTHON=${PYTHON:-.venv/bin/python}
PYPI=${PYPI:-mcp-server-time==2026.10.19 mcp-server-git==2026.10.19}
NPM=${NPM:-@modelcontextprotocol/server-everything@2026.8.31
    @modelcontextprotocol/server-filesystem@2026.8.31}

cd "$(dirname "$0")/.." || exit 1
mkdir -p "$FOLDER" || exit 1
. dev/environment.sh
command -v npm >/dev/null 2>&1 || die "npm is missing, which brings the server that speaks HTTP." \
    "Install it: apt install npm"
begin "$PYPI $NPM"
# shellcheck disable=SC2086  # lists
pip_install $PYPI
echo "$NAME: installing" $NPM "(log: $LOG)"
# shellcheck disable=SC2086
npm install --no-audit --no-fund --prefix "$FOLDER/npm" $NPM >>"$LOG" 2>&1 ||
    die "npm could not install $NPM. Log: $LOG"
finish "mcp_server_time, mcp_server_git"
