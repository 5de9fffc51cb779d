#!/usr/bin/env bash
# The commands a person types. `bash run.sh` lists them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON=.venv/bin/python

usage() {
    cat <<'END'
bash run.sh setup [engine]   make .venv with the pinned packages, or .venv-sglang, .venv-vllm: the same beside an engine
bash run.sh demo  [recipe]   set-up, target, corpus, training, evaluation, picture: the whole story (about 15 minutes on a laptop)
bash run.sh data  [recipe]   the target, its corpus and the task files
bash run.sh train [recipe]   train a draft; continues where it stopped
bash run.sh eval  [recipe]   accept length of the newest checkpoint on the recipe's tasks
bash run.sh report [recipe]  out/<recipe>/report.png and results.json from what the run left
bash run.sh serve-check DIR  do the real vLLM and SGLang make of a checkpoint what our own loop makes of it?
bash run.sh test [engines]   the base tests, or those of SGLang and vLLM in their own environments
bash run.sh lint             ruff
END
}

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# A Python of 3.11 or newer; every environment is made with it.
find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv and ensurepip was found (python3 is $(python3 --version 2>/dev/null ||
        echo missing)); install one (on Debian and Ubuntu: python3 and python3-venv)"
}

setup() {
    local stamp=.venv/requirements.done
    if [ -f "$stamp" ] && cmp -s requirements.txt "$stamp"; then return; fi
    say "setup: .venv with the packages of requirements.txt (the first time takes a minute or more)"
    [ -w . ] || fail "$PWD is not writable; clone the project into a folder of your own"
    local python
    python=$(find_python)
    # One set-up at a time: the lock belongs to the open file 9, which ends with this script at the latest.
    exec 9<requirements.txt
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    if cmp -s requirements.txt "$stamp"; then exec 9<&-; return; fi
    # An environment that was left half-made has no pip; it is made anew.
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv ||
        fail "could not make .venv with $python (see above); is there room on the disk?"
    # The CPU build of torch where the client can have it by that name, else whatever `pip install torch` gives.
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
        fail "the packages could not be installed; see the message above (network? disk?), then run the same command again"
    cp requirements.txt "$stamp"
    exec 9<&-
}

# An engine's environment .venv-NAME: the packages of requirements-NAME.txt and, where that file does not pin another
# version, those of requirements.txt. It is 3 GB, so it lies in the user's cache folder under a hash of the two files.
setup_engine() {
    local name=$1 list=requirements-$1.txt cache=${XDG_CACHE_HOME:-$HOME/.cache}/nanospec/envs python hash env whole
    [ -f "$list" ] || fail "there is no engine named $name; there are: $(ls requirements-*.txt | sed 's/.*-//; s/.txt//' | xargs)"
    python=$(find_python)
    hash=$("$python" -c 'import hashlib, sys
print(hashlib.sha256(b"".join(open(f, "rb").read() for f in sys.argv[1:])).hexdigest()[:12])' "$list" requirements.txt)
    env=$cache/$name-$hash
    mkdir -p "$cache" || fail "cannot write in $cache; mend its permissions or set XDG_CACHE_HOME"
    # One at a time, as above. An environment without its stamp was left half-made.
    exec 9>"$cache/lock"
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    if ! [ -f "$env/requirements.done" ] || ! "$env/bin/python" -c '' 2>/dev/null; then
        say "setup: .venv-$name with the packages of $list and requirements.txt (about 3 GB, some minutes)"
        rm -rf "$env"
        "$python" -m venv "$env" || fail "could not make $env with $python (see above); is there room on the disk?"
        whole=$(nvidia-smi >/dev/null 2>&1 && sed -n 's/^# cuda: //p' "$list") || true
        if [ -n "$whole" ]; then set -- "$whole"; else set -- --no-deps -r "$list"; fi
        "$env/bin/python" -m pip install --quiet --disable-pip-version-check "$@" &&
            "$env/bin/python" -m pip freeze >"$env/engine.txt" &&
            awk '{ split($1, part, "=="); name = tolower(part[1]); gsub("_", "-", name) }
                 NR == FNR { have[name] = $0; next }
                 /^[a-z]/ { print name in have ? have[name] : $1 }' \
                "$env/engine.txt" requirements.txt >"$env/base.txt" &&
            "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -r "$env/base.txt" ||
            fail "the packages of $name could not be installed; see the message above (network? disk?), then run the same command again"
        cat "$list" requirements.txt >"$env/requirements.done"
    fi
    exec 9>&-
    ln -sfn "$env" ".venv-$name"
}

# The tests that run the real engines, each in its own environment. A skipped one counts as a failure: it tested nothing.
test_engines() {
    local name python
    mkdir -p out
    for name in sglang vllm; do
        [ -f "test_$name.py" ] || continue
        setup_engine "$name"
        python=.venv-$name/bin/python
        say "engine tests: $("$python" -m pip freeze 2>/dev/null | grep -E '^(sglang|vllm(-cpu)?|torch|transformers)==' | xargs)"
        "$python" -m pytest -o addopts="-q -p no:cacheprovider -rs" --junitxml="out/test_$name.xml" "test_$name"*.py "$@"
        grep -q ' skipped="0"' "out/test_$name.xml" || fail "the tests named above were skipped: they count as failed"
    done
}

# Ctrl-C: a stage saves what it has and may end well, but the stages after it must not run.
trap 'printf "\nstopped; the same command goes on from here\n" >&2; exit 130' INT

recipe_name() { "$PYTHON" -c 'import sys; from recipe import get_recipe; print(get_recipe(*sys.argv[1:]).name)' "$@"; }

data() {
    say "data: the target, its own answers as the corpus, the task files"
    "$PYTHON" targets.py "$@"
    "$PYTHON" data_glm.py prepare "$@"
    "$PYTHON" data_glm.py tokenize "$@"
}

# What runs the target runs in the environment of the recipe's engine.
use_engine() {
    local engine
    engine=$("$PYTHON" -c 'import sys; from recipe import get_recipe; print(get_recipe(*sys.argv[1:]).engine)' "$@")
    [ "$engine" = transformers ] || { setup_engine "$engine"; PYTHON=.venv-$engine/bin/python; }
}

train() {
    use_engine "$@"
    say "train: the draft of recipe $(recipe_name "$@")"
    "$PYTHON" train.py "$@"
}

# Accept length of the trained draft and, at T = 0, of the untrained one (step_0) on the recipe's tasks.
evaluate() {
    local name out tasks limit new temperature
    use_engine "$@"
    name=$(recipe_name "$@")
    out=out/$name
    say "eval: accept length by propose, verify, accept"
    mapfile -t plan < <("$PYTHON" -c '
import pathlib, sys
from recipe import get_recipe
r = get_recipe(*sys.argv[1:])
tasks = [t for t in r.eval_tasks if pathlib.Path(f"eval_datasets/{t}.jsonl").is_file()]
if missing := sorted(set(r.eval_tasks) - set(tasks)):
    print("left out, their files are not in eval_datasets/:", *missing, file=sys.stderr)
print(r.eval_limit, r.eval_max_new_tokens, *(part for t in tasks for part in ("--task", t)), sep="\n")' "$@")
    [ ${#plan[@]} -gt 2 ] || fail "no task file of this recipe is in eval_datasets/; python data_glm.py tasks builds them"
    limit=${plan[0]} new=${plan[1]} tasks=("${plan[@]:2}")
    "$PYTHON" eval_deepspec.py --draft "$out/step_0" --task "${tasks[1]}" --limit 4 --max-new-tokens "$new" \
        --batch-size 8 --temperature 0 --out "$out/eval-untrained"
    for temperature in 0 1; do
        "$PYTHON" eval_deepspec.py --draft "$out/latest" "${tasks[@]}" --limit "$limit" --max-new-tokens "$new" \
            --batch-size 8 --temperature "$temperature" --out "$out/eval-t$temperature"
    done
}

report() { "$PYTHON" report.py "$@"; }

[ $# -le 2 ] || [ "$1" = test ] || [ "$1" = serve-check ] || fail "expected a command and at most one name, got: $*"

case "${1:-}" in
    setup) if [ $# -gt 1 ]; then setup_engine "$2"; else setup; fi ;;
    demo) shift; SECONDS=0; setup; data "$@"; train "$@"; evaluate "$@"; report "$@"; say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s" ;;
    data | train | report) command=$1; shift; setup; "$command" "$@" ;;
    eval) shift; setup; evaluate "$@" ;;
    test) shift; if [ "${1:-}" = engines ]; then test_engines "${@:2}"; else setup; exec "$PYTHON" -m pytest "$@"; fi ;;
    serve-check)
        shift; setup_engine vllm; .venv-vllm/bin/python serve_check.py "$@"
        setup_engine sglang; exec .venv-sglang/bin/python serve_check.py --engine sglang "$@" ;;
    lint) setup; exec "$PYTHON" -m ruff check . ;;
    "" | help | -h | --help) usage ;;
    *) usage >&2; fail "there is no command named $1" ;;
esac
