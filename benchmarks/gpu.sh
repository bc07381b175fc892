#!/usr/bin/env bash
# Measures everything that needs a GPU: [OUT=folder] [LIMIT=seconds] bash benchmarks/gpu.sh [PIECE ...]
#
# Pieces, most important first:
#   main    readouts, FLOP/s of ViT-B/32 and B/16, steps against open_clip's, PSB against its released form: ten minutes
#   tests   pytest -m gpu
#   knn loss dino frozen mfu step readout video scenes3d evals engines engines_bf16 engines_compiled
# Without a piece, all of them run. OUT/PIECE.txt has the machine's name, every row as soon as it is measured, and the
# tables; OUT/PIECE*.json has the rows. A piece that fails, or takes longer than LIMIT, does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-gpu_figures}
mkdir -p "$out"
python=${PYTHON:-python3}
limit=${LIMIT:-600}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

gpus() { $python -c 'import torch; print(torch.cuda.device_count())'; }

engines() { # two ranks, if each has its own GPU
  local ranks=2
  [ "$(gpus)" -ge 2 ] || { ranks=1; echo "engines: torch sees one GPU; two ranks, ZeRO and offloading need two"; }
  $python benchmarks/engines.py --device cuda --batch 128 --ranks $ranks "$@" --json "$out/$name.json"
}

main() {
  local failed=0
  $python benchmarks/readout.py --quick --batches 1024 --json "$out/main_readout.json" || failed=1
  $python benchmarks/mfu.py --models B/32 B/16 --rounds 5 --json "$out/main_mfu.json" || failed=1
  $python benchmarks/video.py --psb --device cuda --json "$out/main_psb.json" || failed=1
  $python benchmarks/train_step.py --quick --rounds 7 --json "$out/main_step.json" || failed=1
  return $failed
}

piece() {
  case $1 in
    main) main ;;
    tests) $python -m pytest -m gpu -n 0 -p no:cacheprovider -v ;;
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
[ $# -gt 0 ] || set -- main tests knn loss dino frozen mfu step readout video scenes3d evals engines engines_bf16 engines_compiled
failed=0
for name in "$@"; do
  echo "== $name"
  export -f piece main gpus engines
  export out python name
  timeout "$limit" bash -c "$python -c 'from sparo_train.core.disk.rundir import machine_name; print(machine_name())'; piece $name" 2>&1 | tee "$out/$name.txt" || { echo "$name: failed, or took longer than $limit s"; failed=1; }
done
exit $failed
