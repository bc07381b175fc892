#!/usr/bin/env bash
# Every figure that needs a GPU, in pieces of under nine minutes: [OUT=folder] bash benchmarks/gpu.sh [PIECE …]
#
# Each piece writes OUT/PIECE.txt (the machine's name, every row as it is measured, and its tables) and OUT/PIECE*.json; one that fails does not stop the rest.
# Pieces: tests step readout frozen video scenes3d dino loss engines engines_bf16 engines_compiled evals knn mfu. Without a name: all of them, one after another.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-gpu_figures}
mkdir -p "$out"
python=${PYTHON:-python3}
limit=${LIMIT:-530}

gpus() { $python -c 'import torch; print(torch.cuda.device_count())'; }

engines() { # of two ranks, each with a GPU of its own
  local ranks=2
  [ "$(gpus)" -ge 2 ] || { ranks=1; echo "engines: one GPU seen; two ranks, ZeRO and offload need two"; }
  $python benchmarks/engines.py --device cuda --batch 128 --ranks $ranks "$@" --json "$out/$name.json"
}

piece() {
  case $1 in
    tests) $python -m pytest -m gpu -n 0 -p no:cacheprovider ;;
    step) $python benchmarks/train_step.py --json "$out/step.json" ;;
    readout) $python benchmarks/readout.py --compile --batches 256 1024 --json "$out/readout.json" ;;
    frozen) $python benchmarks/frozen.py --batch 256 --json "$out/frozen.json" ;;
    video) $python benchmarks/video.py --device cuda --json "$out/video.json" ;;
    scenes3d) $python benchmarks/scenes3d.py --device cuda --json "$out/scenes3d.json" ;;
    dino) $python benchmarks/dino_step.py --json "$out/dino.json" ;;
    loss) $python benchmarks/loss_memory.py --device cuda --json "$out/loss.json" ;;
    engines) engines ;;
    engines_bf16) engines --precision bf16 ;;
    engines_compiled) engines --precision bf16 --compile ;;
    evals) $python benchmarks/evals.py --device cuda --json "$out/evals.json" ;;
    knn) $python benchmarks/knn.py --device cuda --json "$out/knn.json" ;;
    mfu) $python benchmarks/mfu.py --json "$out/mfu.json" ;;
    *) echo "no such piece: $1"; return 2 ;;
  esac
}

[ "$(gpus)" -ge 1 ] || { echo "no GPU: torch sees none"; exit 2; }
[ $# -gt 0 ] || set -- tests step readout frozen video scenes3d dino loss engines engines_bf16 engines_compiled evals knn mfu
failed=0
for name in "$@"; do
  echo "== $name"
  export -f piece gpus engines
  export out python name
  timeout "$limit" bash -c "$python -c 'from sparo_train.core.disk.rundir import machine_name; print(machine_name())'; piece $name" 2>&1 | tee "$out/$name.txt" || { echo "$name: failed or over $limit s"; failed=1; }
done
exit $failed
