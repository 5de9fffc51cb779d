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
bash run.sh plan  [recipe]   how the batch is cut, how many steps, how much memory per GPU; starts nothing
bash run.sh train [recipe]   train a draft; continues where it stopped; with --smoke four steps with a save and a resume
bash run.sh eval  [recipe]   accept length of the newest checkpoint on the recipe's tasks
bash run.sh sync  [recipe]   give every node the checkpoints that the others hold, where each has a disk of its own
      plan, train, eval, sync take --nproc N, processes on this node (default: one per GPU, else one), and for more nodes,
      on each of them: --nnodes N --node-rank R --master HOST [--port P]; train and eval --max-restarts N (default 3)
bash run.sh report [recipe]  out/<recipe>/report.png and results.json from what the run left
bash run.sh cotrain [name]   reinforcement learning with a drafter that follows it, against a frozen one
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
        setup_engine "$name"
        python=.venv-$name/bin/python
        say "engine tests: $("$python" -m pip freeze 2>/dev/null | grep -E '^(sglang|vllm(-cpu)?|torch|transformers)==' | xargs)"
        "$python" -m pytest -o addopts="-q -p no:cacheprovider -rs" --junitxml="out/test_$name.xml" "test_$name"*.py "$@"
        grep -q ' skipped="0"' "out/test_$name.xml" || fail "the tests named above were skipped: they count as failed"
    done
}

# Ctrl-C: a stage saves what it has and may end well, but the stages after it must not run.
stopped() { printf '\nstopped; the same command goes on from here\n' >&2; exit "$1"; }
trap 'stopped 130' INT

# KEY [RECIPE]: one value of a recipe.
recipe() { "$PYTHON" -c 'import sys; from recipe import get_recipe; print(getattr(get_recipe(*sys.argv[2:]), sys.argv[1]))' "$@"; }

data() {
    say "data: the target, its own answers as the corpus, the task files"
    "$PYTHON" targets.py "$@"
    "$PYTHON" data_glm.py prepare "$@"
    "$PYTHON" data_glm.py tokenize "$@"
}

# What runs the target runs in the environment of the recipe's engine.
use_engine() {
    local engine
    engine=$(recipe engine "$@")
    [ "$engine" = transformers ] || { setup_engine "$engine"; PYTHON=.venv-$engine/bin/python; }
}

# Where to run: sets nnodes, node_rank, master, port, nproc, restarts, smoke, samples and the list rest.
parse() {
    nnodes=1 node_rank='' master='' port=29500 nproc='' restarts=3 smoke='' samples=0 rest=()
    while [ $# -gt 0 ]; do
        case "$1" in
            --smoke) smoke=yes; shift; continue ;;
            --nnodes) nnodes=${2:-} ;; --node-rank) node_rank=${2:-} ;; --master) master=${2:-} ;; --port) port=${2:-} ;;
            --nproc) nproc=${2:-} ;; --max-restarts) restarts=${2:-} ;; --samples) samples=${2:-} ;;
            -*) fail "there is no option $1; bash run.sh lists them" ;;
            *) rest+=("$1"); shift; continue ;;
        esac
        [ $# -gt 1 ] || fail "$1 wants a value"
        shift 2
    done
    [ "${#rest[@]}" -le 1 ] || fail "expected at most one recipe, got: ${rest[*]}"
    [ -n "$nproc" ] || nproc=$(nvidia-smi -L 2>/dev/null | grep -c ^GPU) || nproc=1
}

# PROGRAM ARGS...: one process, or torchrun's on this node, of as many nodes as were asked for.
launch() {
    local command=("$PYTHON") address interface status code=''
    if [ $((nnodes * nproc)) -gt 1 ]; then
        # A signal that reaches torchrun itself leaves the workers the time that a step may take.
        command+=(-m torch.distributed.run --nproc-per-node "$nproc" --max-restarts "$restarts"
            --signals-to-handle SIGTERM,SIGHUP,SIGQUIT --shutdown-timeout 3600)
        if [ "$nnodes" = 1 ]; then command+=(--standalone); else
            [ -n "$node_rank" ] && [ -n "$master" ] || fail "$nnodes nodes: say which one this is, --node-rank 0 to $((nnodes - 1)), and --master, an address of node 0"
            command+=(--nnodes "$nnodes" --node-rank "$node_rank" --master-addr "$master" --master-port "$port")
            [ -e /dev/infiniband/uverbs0 ] || export NCCL_IB_DISABLE=1
            # The interface with the master's address, or the one that leads there.
            address=$(getent ahostsv4 "$master" | awk 'NR == 1 { print $1 }') || true
            interface=$(ip -o addr show to "$address" 2>/dev/null | awk 'NR == 1 { print $2 }') || true
            [ -n "$interface" ] || interface=$(ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p') || true
            [ -z "$interface" ] || export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"
        fi
    fi
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True    # safe: the engine in the process runs without CUDA graphs
    "${command[@]}" "$@" &
    launched=$!
    trap 'code=130; forward "$1"' INT
    trap 'code=0; forward "$1"' TERM
    while status=0; wait "$launched" || status=$?; kill -0 "$launched" 2>/dev/null; do :; done
    trap 'stopped 130' INT
    trap - TERM
    [ -z "$code" ] || stopped $((status ? status : code))
    return "$status"
}

# SIGTERM to the workers themselves: they save and exit 0, and then so does torchrun, which makes a failure of a SIGTERM
# of its own. Programs that just end get it through torchrun.
forward() {
    local workers=''
    [ "$1" != train.py ] || read -r workers 2>/dev/null <"/proc/$launched/task/$launched/children" || true
    # shellcheck disable=SC2086
    kill -TERM ${workers:-$launched} 2>/dev/null || true
}

train() {
    parse "$@"
    use_engine "${rest[@]}"
    if [ -n "$smoke" ]; then
        say "smoke: two steps of recipe $(recipe name "${rest[@]}") and a save, then two more after a resume"
        launch train.py "${rest[@]}" --smoke 2
        launch train.py "${rest[@]}" --smoke 4
        say "smoke: done, it trains, saves and resumes"
    else
        say "train: the draft of recipe $(recipe name "${rest[@]}")"
        launch train.py "${rest[@]}"
    fi
}

plan() {
    parse "$@"
    "$PYTHON" plan.py "${rest[@]}" --nnodes "$nnodes" --nproc "$nproc" --samples "$samples"
}

mirror() {
    parse "$@"
    nproc=1 restarts=0
    launch checkpoint.py sync "${rest[@]}"
}

# Accept length of the trained draft and, at T = 0, of the untrained one (step_0) on the recipe's tasks.
evaluate() {
    local name out tasks limit new temperature
    parse "$@"
    set -- "${rest[@]}"
    use_engine "$@"
    name=$(recipe name "$@")
    out=out/$name
    [ -e "$out/latest" ] || fail "no checkpoint in $out; train first: bash run.sh train $name"
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
    launch eval_deepspec.py --draft "$out/step_0" --task "${tasks[1]}" --limit 4 --max-new-tokens "$new" \
        --batch-size 8 --temperature 0 --out "$out/eval-untrained"
    for temperature in 0 1; do
        launch eval_deepspec.py --draft "$out/latest" "${tasks[@]}" --limit "$limit" --max-new-tokens "$new" \
            --batch-size 8 --temperature "$temperature" --out "$out/eval-t$temperature"
    done
}

report() { "$PYTHON" report.py "$@"; }

# Reinforcement learning with a drafter that follows, then the frozen drafter on the same targets, then both in one picture.
cotrain() {
    local name=${1:-toy} python=.venv-vllm/bin/python
    [ "$name" != toy ] || "$python" cotrain.py toy-drafter
    "$python" cotrain.py "$name"
    "$python" cotrain.py "$name" --frozen
}

[ $# -le 2 ] || [[ " test serve-check plan train eval sync " == *" $1 "* ]] || fail "expected a command and at most one name, got: $*"

case "${1:-}" in
    setup) if [ $# -gt 1 ]; then setup_engine "$2"; else setup; fi ;;
    demo) shift; SECONDS=0; setup; data "$@"; train "$@"; evaluate "$@"; report "$@"; say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s" ;;
    data | train | report | plan) command=$1; shift; setup; "$command" "$@" ;;
    eval) shift; setup; evaluate "$@" ;;
    sync) shift; setup; mirror "$@" ;;
    test) shift; if [ "${1:-}" = engines ]; then test_engines "${@:2}"; else setup; exec "$PYTHON" -m pytest "$@"; fi ;;
    cotrain) shift; setup_engine vllm; cotrain "$@" ;;
    serve-check)
        shift; setup_engine vllm; .venv-vllm/bin/python serve_check.py "$@"
        setup_engine sglang; exec .venv-sglang/bin/python serve_check.py --engine sglang "$@" ;;
    lint) setup; exec "$PYTHON" -m ruff check . ;;
    "" | help | -h | --help) usage ;;
    *) usage >&2; fail "there is no command named $1" ;;
esac
