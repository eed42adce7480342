#!/usr/bin/env bash
# The benchmarks as a dated record of this machine: tables as text, those of training steps as JSON too.
#   bash tools/dev/benchmarks/record.sh                    into docs/records/<date>, on the GPU where there is one
#   QUICK=1 bash tools/dev/benchmarks/record.sh FOLDER     one round of one image, to see that everything runs
# Takes half an hour on a GPU, several hours on a CPU. docs/performance.md says what the tables mean.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
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
  step=(--batch 64 128 256 --rounds 20 --compile --profile 15) dino=(--batch 64 --rounds 5)
  segmentation=(--precision bfloat16)
else
  lscpu > "$folder/device.txt"
  step=(--batch 8 --rounds 7 --threads 2 --profile 10) dino=(--batch 8 --rounds 5)
  segmentation=(--precision float32)
fi
if [[ ${QUICK:-} ]]; then
  step=(--batch 1 --rounds 1 --threads 1 --precision float32) dino=("${step[@]}") segmentation=(--rounds 1 --narrow)
fi

for what in pretrain finetune; do
  bench "$what" step.py "$what" "${step[@]}" --json "$folder/$what.json"
  bench "${what}_large" step.py "$what" "${step[@]}" --arch large --json "$folder/${what}_large.json"
done
bench dino step.py dino "${dino[@]}" --json "$folder/dino.json"
bench segmentation segmentation.py "${segmentation[@]}"
bench pipeline pipeline.py ${QUICK:+--rounds 1}
bench pipeline_finetune pipeline.py --finetune ${QUICK:+--rounds 1}
bench checkpoint checkpoint.py ${QUICK:+--rounds 1}

((${#failed[@]})) && { echo "failed: ${failed[*]}" >&2; exit 1; }
echo "record: $folder"
