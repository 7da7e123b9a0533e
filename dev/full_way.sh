#!/bin/sh
# From a team of smolagents to one model that is served, by the commands that a user would type.
#
#   sh dev/full_way.sh FOLDER [STEP...]     all steps, or those that are named, in this order:
#     record init distill sft eval rl eval-rl compare serve
#
# Nothing of the team is changed. The code of one's own beside it is the few lines of `init` below: the
# tools, the questions and the reward. The team's model is a script that knows no answer
# (examples/office/model.py), so what is measured is the way, the student, and a team's cost in tokens;
# not how good a language model is at leading a team. Each step goes on where it was stopped.
# TEAM (another one of examples/office), COA, PYTHON (of dev/frameworks.sh), BASE, EPISODES, TESTS, PORT,
# and settings for the recipes in SFT and RL can be set.
set -eu

OUT=${1:?a folder for what is made}
shift
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
ROOT=$(cd "$(dirname "$0")/.." && pwd)
TEAM=${TEAM:-smolagents_team.py}
COA=${COA:-$ROOT/.venv/bin/coa}
PYTHON=${PYTHON:-$ROOT/.cache/frameworks/teams/bin/python}
BASE=${BASE:-smollm2-135m}
EPISODES=${EPISODES:-200}
TESTS=${TESTS:-100}
PORT=${PORT:-8765}
SFT=${SFT:-sft.epochs=6}
RL=${RL:-}
STEPS=${*:-record init distill sft eval rl eval-rl compare serve}
cd "$ROOT/examples/office"

record() {
    # The team at work, on questions to train on and on those of the test, to compare it with its student.
    "$PYTHON" model.py --port 0 --seed 1 >"$OUT/model.txt" &
    model=$!
    trap 'kill $model' EXIT
    until grep -q export "$OUT/model.txt"; do sleep 0.2; done
    eval "$(cat "$OUT/model.txt")"
    head -n "$EPISODES" train.jsonl >"$OUT/train.jsonl"
    head -n "$TESTS" test.jsonl >"$OUT/test.jsonl"
    for split in train test; do
        "$COA" record --env . --tasks "$OUT/$split.jsonl" --out "$OUT/team-$split.jsonl" \
            -- "$PYTHON" "$TEAM" "{question}"
        "$COA" check "$OUT/team-$split.jsonl"
    done
    kill $model
    trap - EXIT
}

init() {
    # All that a user writes: which functions the tools are, and where the questions come from.
    [ -d "$OUT/student" ] || "$COA" init "$OUT/student" --from "$OUT/team-train.jsonl"
    cp office.py train.jsonl "$OUT/test.jsonl" "$OUT/student"
    { echo 'grammar = "grammar.toml"' && cat environment.toml; } >"$OUT/student/environment.toml"
    "$COA" check "$OUT/student"
}

distill() {
    "$COA" distill --episodes "$OUT/team-train.jsonl" --env "$OUT/student" --out "$OUT/dataset"
}

sft() {
    # shellcheck disable=SC2086  # settings, a=b
    "$COA" sft sft-135m trajectories="$OUT/dataset" out="$OUT/sft" sft.model="$BASE" $SFT
}

measure() {
    "$COA" eval --env "$OUT/student" --model "$BASE+$OUT/$1/adapter" --out "$OUT/eval-$1"
}

rl() {
    # shellcheck disable=SC2086
    "$COA" rl rl-135m env="$OUT/student" rl.model="$BASE+$OUT/sft/adapter" out="$OUT/rl" $RL
}

compare() {
    for stage in sft rl; do
        [ ! -d "$OUT/eval-$stage" ] ||
            "$COA" compare "$OUT/team-test.jsonl" "$OUT/eval-$stage" --env "$OUT/student"
    done
}

serve() {
    # One question to the served student, as any client of OpenAI's asks it.
    stage=rl
    [ -d "$OUT/rl/adapter" ] || stage=sft
    "$COA" serve --env "$OUT/student" --model "$BASE+$OUT/$stage/adapter" --port "$PORT" &
    server=$!
    trap 'kill $server' EXIT
    at=http://127.0.0.1:$PORT/v1
    for _ in $(seq 120); do
        curl -sf "$at/models" >"$OUT/models.json" && break
        sleep 1
    done
    name=$(sed 's/.*"id": *"\([^"]*\)".*/\1/' "$OUT/models.json")
    question=$(head -n 1 test.jsonl | sed 's/.*"question": "\([^"]*\)".*/\1/')
    curl -s "$at/chat/completions" -H 'Content-Type: application/json' \
        -d "{\"model\": \"$name\", \"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]}"
    echo
    kill $server
    trap - EXIT
}

for step in $STEPS; do
    echo "== $step"
    case $step in
        eval) measure sft ;;
        eval-rl) measure rl ;;
        record | init | distill | sft | rl | compare | serve) $step ;;
        *) echo "full_way: there is no step $step" >&2 && exit 2 ;;
    esac
done
