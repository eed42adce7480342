#!/usr/bin/env bash
# The benchmarks as a dated record of this machine: tables as text, those of training steps as JSON too.
#   bash tools/dev/benchmarks/record.sh                    into docs/records/<date>, on the GPU where there is one
#   QUICK=1 bash tools/dev/benchmarks/record.sh FOLDER     one round of one image, to see that everything runs
# Takes half an hour on a GPU, several hours on a CPU. docs/performance.md says what the tables mean.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; }

folder=${1:-docs/records/$(date +%F)}
python=${PYTHON:-python}
mkdir -p "$folder"
failed=()

bench() { # name, script and arguments
  local name=$1
  shift
  echo "=== $name: python tools/dev/benchmarks/$*"
  "$python" tools/dev/benchmarks/"$@" 2>&1 | tee "$folder/$name.txt" || failed+=("$name")
}

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  nvidia-smi > "$folder/device.txt"
  step=(--batch 64 128 256 --rounds 20 --compile --profile 15)
  inference=(--precision bfloat16)
else
  lscpu > "$folder/device.txt"
  step=(--batch 8 --rounds 7 --threads 2 --profile 10)
  inference=(--precision float32)
fi
[[ ${QUICK:-} ]] && step=(--batch 1 --rounds 1 --threads 1 --precision float32) inference=(--rounds 1)

bench pretrain_base pretrain_step.py "${step[@]}" --json "$folder/pretrain_base.json"
bench pretrain_large pretrain_step.py "${step[@]}" --arch large --json "$folder/pretrain_large.json"
bench finetune_base finetune_step.py "${step[@]}" --json "$folder/finetune_base.json"
bench finetune_large finetune_step.py "${step[@]}" --arch large --json "$folder/finetune_large.json"
bench segmentation segmentation_inference.py "${inference[@]}"
dino=(--batch "${step[1]}" --rounds 5)
[[ ${QUICK:-} ]] && dino=(--batch 1 --rounds 1 --precision float32)
bench dino dino_step.py "${dino[@]}" --json "$folder/dino.json"
bench pipeline pipeline.py ${QUICK:+--rounds 1}
bench pipeline_finetune pipeline.py --finetune ${QUICK:+--rounds 1}
bench checkpoint checkpoint.py

((${#failed[@]})) && { echo "failed: ${failed[*]}" >&2; exit 1; }
echo "record: $folder"
