#!/usr/bin/env bash
# Measures, in less than ten minutes, what only a card can show (an H100 or H200; docs/gpu.md, "The short run").
#
#   FOLDER/short_run.sh                          in the folder that `make short-run` made, on the machine with the card
#   tools/gpu/short_run.sh --backend link        a rehearsal in these sources: tiny models, a simulated device
#
# OUT: the folder for results.json, results.txt and log.txt (default: short-run in the current folder). WORK: the folder
# for 16 GB of models (default: moegguf-short-run in /dev/shm if that has 20 GB free, else in /tmp). PYTHON: the
# interpreter. Other arguments are passed to tools/gpu/short_run.py.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
memory_kb=$(df --output=avail -k /dev/shm 2> /dev/null | tail -1)
[ "${memory_kb:-0}" -gt 20000000 ] && folder=/dev/shm || folder=/tmp
OUT=${OUT:-$PWD/short-run}
WORK=${WORK:-$folder/moegguf-short-run}
mkdir -p "$OUT" "$WORK"
WORK=$(cd "$WORK" && pwd)
if [ -e "$here/sources.tar.xz" ]; then
    root=$WORK/sources
    python=${PYTHON:-python3}
    mkdir -p "$root" "$WORK/site"
    "$python" -m tarfile -e "$here/sources.tar.xz" "$root"
    for wheel in "$here"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$WORK/site"; done
    PYTHONPATH=$WORK/site${PYTHONPATH:+:$PYTHONPATH}
    [ ! -e "$root/library/micro" ] || chmod +x "$root/library/micro"
    set -- --library "$root/library" "$@"
else
    root=$(cd "$here/../.." && pwd)
    python=${PYTHON:-$root/.venv/bin/python}
fi
# -P and no cd: other sources in the current folder are not imported, and relative paths in options keep their meaning.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec timeout -k 5 590 "$python" -P -m tools.gpu.short_run --out "$OUT" --work "$WORK" "$@"
