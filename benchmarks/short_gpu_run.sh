#!/usr/bin/env bash
# Runs a part of a study on a GPU machine that has no network, is lent for minutes, and takes few megabytes at a time.
#
# Here, with the texts and the encoder (docs/reference.md#definitions-of-wordnet), and an archive with the packages that the machine lacks
# (bundle.tar.xz with venv/setup.py, which makes venv/bin; "" if it lacks none):
#   bash benchmarks/short_gpu_run.sh pack TEXTS MODEL BUNDLE PARTS     # PARTS/part-aa, ... of at most 56 MB
# There, in the checkout, once for each part, and then as often as there is time:
#   bash benchmarks/short_gpu_run.sh add PART DIR
#   bash benchmarks/short_gpu_run.sh run DIR OUT SECONDS               # OUT/runs.jsonl has the new runs, OUT/results.md the tables
# Here again, so that the study continues where it stopped:
#   bash benchmarks/short_gpu_run.sh record OUT
#
# STUDY is the study's file (conf/studies/wordnet.yaml), JOBS the runs at a time (4), DEVICE where they compute (cuda), XZ the compression (-6).
# To try it on a CPU: LAYERS=2, a study with a few steps, DEVICE=cpu JOBS=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
study=${STUDY:-conf/studies/wordnet.yaml}
name=$(basename "$study" .yaml)
record=studies/$name/runs.jsonl
[ -d .venv ] && PATH=$PWD/.venv/bin:$PATH

pack() {
    local texts=$1 model=$2 bundle=$3 parts=$4 made
    made=$(mktemp -d)
    mkdir -p "$parts" "$made/texts"
    rm -f "$parts"/part-*
    python -m scripts.cut_vocabulary "$model" "$texts" "$made/model" ${LAYERS:+--layers "$LAYERS"}
    cp "$texts"/*.jsonl "$made/texts"
    if [ -f "$record" ]; then cp "$record" "$made/runs.jsonl"; fi
    if [ -n "$bundle" ]; then cp "$bundle" "$made/bundle.tar.xz"; fi
    tar -C "$made" -c . | xz -T0 "${XZ:--6}" | split -b 56m - "$parts/part-"
    rm -r "$made"
    ls -l "$parts"
}

add() {
    mkdir -p "$2"
    cp "$1" "$2"
}

run() {
    local folder out=$2 seconds=$3 status=0
    folder=$(realpath "$1")
    mkdir -p "$out"
    if [ ! -d "$folder/model" ]; then
        cat "$folder"/part-* | xz -d | tar -C "$folder" -x
        if [ -f "$folder/bundle.tar.xz" ]; then
            tar -C "$folder" -xJf "$folder/bundle.tar.xz"
            python3 "$folder/venv/setup.py" "$PWD"
        fi
        mkdir -p "studies/$name"
        if [ -f "$folder/runs.jsonl" ]; then cp "$folder/runs.jsonl" "$record"; fi
    fi
    [ -d "$folder/venv/bin" ] && PATH=$folder/venv/bin:$PATH
    export HF_HUB_OFFLINE=1
    # Rows come in the order of the file. A run that the time cuts off is not recorded, and is run again.
    timeout --signal=TERM --kill-after=10 "$seconds" python -m ravan_flwr study "$study" --jobs "${JOBS:-4}" \
        "data=$folder/texts" "model=$folder/model" "device=${DEVICE:-cuda}" || status=$?
    if [ -f "$record" ]; then cp "$record" "$out/runs.jsonl"; fi
    timeout 60 python -m ravan_flwr study "$study" --tables-only "data=$folder/texts" "model=$folder/model" || true
    if [ -f "studies/$name/results.md" ]; then cp "studies/$name/results.md" "$out/results.md"; fi
    [ "$status" -eq 124 ] && echo "stopped after $seconds s; $(wc -l <"$out/runs.jsonl") runs are recorded" && status=0
    return "$status"
}

record() {
    mkdir -p "studies/$name"
    touch "$record"
    # New lines alone: the machine's record begins with the one that was packed.
    local new
    new=$(grep --invert-match --line-regexp --fixed-strings --file="$record" "$1/runs.jsonl" || true)
    if [ -n "$new" ]; then printf '%s\n' "$new" >>"$record"; fi
    echo "$record has $(wc -l <"$record") runs"
}

case ${1:-} in
    pack | add | run | record) "$@" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
