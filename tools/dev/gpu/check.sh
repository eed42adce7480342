#!/usr/bin/env bash
# What only a GPU can show, in one command: does the project work there, how fast is it, where does the time go?
#   bash tools/dev/gpu/check.sh OUT                  all parts that fit into 15 minutes
#   BUDGET=240 PARTS="segment large" bash tools/dev/gpu/check.sh OUT     in 240 s these, by the beginning of their names
#   bash tools/dev/gpu/check.sh OUT --rehearse       narrow models on a CPU, to see that every part runs
# OUT gets summary.txt, results.jsonl (one JSON object a line), logs/ and traces/ (for Perfetto). Parts come in the
# order of their worth. Each has a limit of its own, and is left out if too little of BUDGET is left. What a part has
# measured when it runs out of time is kept. A node without network needs the wheels of collect.sh.
# More settings: PYTHON; BATCH, images of a step of BEiT-Base (256); WORKERS, processes that read images (all cores but
# two); PHOTOS, a folder or a zip with train/<class>/ and val/<class>/, for `photos`, `start_`, `packaged` and `thousand`;
# LABEL_MAPS, one with images and label maps, for `maps` and `dinov2`; SMALL_IMAGES, what hundred_epochs.py has packed,
# for `hundred`; TEACHER, a plain ViT, for `hundred`, `start_` and `packaged`; STEPS of `thousand` (1000); STATE, the
# folder of packages, images, compiled kernels and what `hundred` has finished, which the next call uses again.
# README.md beside this file has the order, the minutes and what was expected.
set -uo pipefail

[[ $# -ge 1 && $1 != -* && ${2:---rehearse} == --rehearse && $# -le 2 ]] || { sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
out=$(realpath -m "$1")
PHOTOS=${PHOTOS:+$(realpath "$PHOTOS")}
LABEL_MAPS=${LABEL_MAPS:+$(realpath "$LABEL_MAPS")}
SMALL_IMAGES=${SMALL_IMAGES:+$(realpath "$SMALL_IMAGES")}
TEACHER=${TEACHER:+$(realpath "$TEACHER")}
rehearse=$([[ ${2:-} == --rehearse ]] && echo _rehearsal)
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1

# --- settings ---
python=${PYTHON:-python3}
memory=/dev/shm # images are read from memory: disks are another question
(($(df -k --output=avail "$memory" 2> /dev/null | tail -n 1) > 8000000)) || memory=${TMPDIR:-/tmp}
state=${STATE:-$memory/beit_mm_check_$UID$rehearse}
images=$state/images
logs=$out/logs
status=$logs/status.txt
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))') || { echo "error: no Python at $python" >&2; exit 1; }
[[ ${BUDGET:-0} =~ ^[0-9]+$ ]] || { echo "error: BUDGET=$BUDGET; expected seconds" >&2; exit 1; }
[[ ! -e $out/results.jsonl ]] || { echo "error: $out has results; choose another folder" >&2; exit 1; }
declare -A heads # of segmentors
if [[ $rehearse ]]; then
  budget=${BUDGET:-3600} patience=8 # limits are those of a GPU
  pretraining=configs/demo/pretrain.py paper=$pretraining
  finetuning=configs/demo/finetune_folder.py
  segmentor=configs/demo/segment_upernet.py masks=configs/demo/segment_masks.py
  heads=([upernet]=$segmentor [masks_decoder]=$masks)
  features=configs/demo/pretrain_features.py
  tokens=() # the demo has its own tokenizer
  number_of_images=160 steps=20 batch=4 workers=1 resume_batch=4 small_batch=4 head_batch=4
  model=(--narrow --batch 2 --rounds 1 --threads 1 --precision float32)
  large=("${model[@]}") dino=("${model[@]}")
  kernels=(--narrow --batch 2 --rounds 1 --threads 1 --backend aot_eager)
  many=(--narrow --batch 2 3 --rounds 1 --threads 1 --precision float32)
  segment=(--narrow --rounds 1)
  compile=(--compile backend=aot_eager) graphs=("${compile[@]}") autotune=("${compile[@]}") profile=2
  # --compile would compile for a minute
  compiled=$state/compiled.py compiled_words=()
  mkdir -p "$state"
  echo "_base_ = '$PWD/$pretraining'
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.CompileHook', backend='aot_eager')]" > "$compiled"
  PHOTOS=${PHOTOS:-$images} learning=(--steps 20 --batch 8 --workers 1)
  LABEL_MAPS=${LABEL_MAPS:-$images} minutes=0.1
  thousand=(40 4 1 optim_wrapper.optimizer.lr=6e-4) curve=20
  hundred=(--rehearse --seconds 0.3 --batch 8 --jobs 1 --seeds 0 --rates 1e-3) taught=20 pays=()
  TEACHER=${TEACHER:-demo}
  processes=2
else
  budget=${BUDGET:-900} patience=1
  pretraining=configs/beit_plus/pretrain_300e.py paper=configs/beit/pretrain_300e.py
  finetuning=configs/beit/finetune_in1k_100e.py
  segmentor=configs/beit/upernet_512_ade20k_160k.py
  masks=configs/beit_plus/masks_512_ade20k_39k_after_in22k.py
  heads[setr_pup]=configs/beit/setr_pup_512_ade20k_160k.py
  for name in linear masks masks_decoder; do heads[$name]=configs/beit_plus/${name}_512_ade20k_39k_after_in22k.py; done
  heads[upernet]=configs/beit_plus/upernet_512_ade20k_160k_after_in22k.py
  features=configs/beit/pretrain_features_ema_300e.py
  tokens=(model.target_generator.random_weights=True)
  number_of_images=1000 steps=60 batch=${BATCH:-256} workers=${WORKERS:-$((cores > 3 ? cores - 2 : 1))}
  resume_batch=32 small_batch=64 head_batch=16
  model=(--batch "$batch" --rounds 8 --threads 8)
  large=(--arch large --batch $((batch / 2)) --rounds 5 --threads 8)
  dino=(--batch $((batch / 4)) --rounds 5 --threads 8)
  kernels=(--batch "$batch")
  segment=(--precision bfloat16 --rounds 3)
  compile=(--compile) graphs=(--compile mode=reduce-overhead) profile=10
  compiled=$pretraining compiled_words=(--compile)
  minutes=1.3 learning=(--minutes 1.3 --workers "$((workers / 4 + 1))")
  thousand=(${STEPS:-1000} "$batch" "$workers" optim_wrapper.optimizer.lr=6e-4) curve=300
  hundred=() taught=20000
  pays=(none_ema demo_tokens)
  [[ $TEACHER ]] && pays+=(none_teacher demo_teacher strong_tokens strong_ema strong_teacher)
  many=(--batch 512 1024 --rounds 5 --threads 8) autotune=(--compile mode=max-autotune-no-cudagraphs)
  processes=4
fi
data=(data_root="$images" "${tokens[@]}")
benchmarks=tools/dev/benchmarks
own=("$python" tools/dev/gpu/parts.py)
cudnn=("$python" tools/dev/gpu/cudnn_attention.py)
rounded=("$python" tools/dev/gpu/bf16_residual.py)
small=$state/hundred_epochs

# --- functions ---
say() { printf '%4d s  %s\n' "$SECONDS" "$*" | tee -a "$status"; }

wanted() { # NAME
  local beginning
  [[ ${PARTS:-} ]] || return 0
  for beginning in $PARTS; do [[ $1 == "$beginning"* ]] && return 0; done
  return 1
}

part() { # NAME LIMIT NEED COMMAND...: runs it for at most LIMIT s; leaves it out if fewer than NEED s are left
  local name=$1 limit=$(($2 * patience)) need=$3 begin=$SECONDS left=$((budget - SECONDS - 10))
  local code=0 note='' child
  shift 3
  wanted "$name" || return 0
  [[ $name == images || $* != *"$images"* || -d $images ]] || { say "$name: left out, there are no images"; return 0; }
  ((left >= need)) || { say "$name: left out, needs $need s and has $left"; return 0; }
  PART=$name timeout -k 5 $((limit < left ? limit : left)) "$@" > "$logs/$name.txt" 2> "$logs/$name.err" &
  child=$!
  trap 'kill "$child"; exit 143' INT TERM
  wait "$child" || code=$?
  ((code == 124 || code == 137)) && note=', out of time'
  say "$name: exit $code after $((SECONDS - begin)) s$note"
  printf '{"part": "%s", "exit": %d, "seconds": %d}\n' "$name" "$code" $((SECONDS - begin)) >> "$RESULTS"
}

alone() { # the same, then brings the summary up to date
  part "$@"
  summarize
}

summarize() {
  local name result
  {
    echo '== parts'
    cat "$status"
    while read -r _ _ name result; do
      name=${name%:}
      [[ -f $logs/$name.txt ]] || continue
      printf '\n== %s: %s\n' "$name" "$result"
      [[ $result == exit\ 0* ]] || tail -n 12 "$logs/$name.err" | cut -c1-300
      grep -vE 'Could not import OneDL|^ *$' "$logs/$name.txt" | tail -n 80 | cut -c1-160
    done < "$status"
  } > "$out/summary.txt"
}

# --- packages ---
mkdir -p "$logs" "$state"
if compgen -G '.whl/*.whl' > /dev/null; then
  rm -rf "$state/site"
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$state/site" .whl/*.whl || exit 1
fi
export PYTHONPATH=$PWD:$state/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHON=$python
export TORCHINDUCTOR_CACHE_DIR=$state/inductor WORK=$state/work RESULTS=$out/results.jsonl
: > "$RESULTS"
# yapf writes a file at its first import, of which processes that import it at the same time read half
imports='import yapf.yapflib.yapf_api, mmpretrain.models, mmseg.models, timm, transformers, pytest'
if ! "$python" -c "$imports" &> "$logs/import.txt"; then
  tail -n 1 "$logs/import.txt"
  echo 'error: install requirements/onedl.txt and dev.txt, or run tools/dev/gpu/collect.sh and copy .whl here' >&2
  exit 1
fi
say "ready"
{ nvidia-smi; lscpu; "$python" -m pip list; } > "$logs/machine.txt" 2>&1

# --- speed ---
alone facts 60 5 "${own[@]}" facts
alone cudnn_check 60 20 "${cudnn[@]}" check
alone cudnn_time 60 20 "${cudnn[@]}" time
alone cudnn_step 150 60 "${cudnn[@]}" step pretrain "${model[@]}" "${compile[@]}" --json "$RESULTS"
alone step_pretrain 150 50 "$python" $benchmarks/step.py pretrain "${model[@]}" "${compile[@]}" --waits \
  --profile $profile --traces "$out/traces" --json "$RESULTS"
alone kernels 90 30 "$python" $benchmarks/kernels.py "${kernels[@]}" --json "$RESULTS"

# --- does it work? nothing is timed, so all at once; fine-tuning is compiled here for its timing below ---
reading=no
for name in resume distributed finetune lora upernet masks features float16 all_scales train_ head_ loss_; do
  wanted $name && reading=yes
done
if [[ $PHOTOS == "$images" ]]; then
  wanted start_ && reading=yes
  wanted packaged && reading=yes
  wanted hundred && reading=yes
  wanted thousand && reading=yes
fi
[[ $reading == no || -d $images ]] || PARTS='' alone images 120 5 "${own[@]}" images "$images" $number_of_images
part pytest 140 30 "$python" -m pytest -m gpu tests/gpu -n $processes --timeout $((130 * patience)) \
  -p no:cacheprovider &
part resume 140 40 "${own[@]}" resume $pretraining $steps $resume_batch 2 "${data[@]}" randomness.deterministic=True &
part distributed 140 30 "${own[@]}" distributed $pretraining $((steps / 3)) 8 2 "${data[@]}" &
part finetune 140 30 "${own[@]}" train $finetuning $((steps / 3)) $small_batch 2 data_root="$images" \
  model.backbone.init_cfg=None model.head.num_classes=10 model.data_preprocessor.num_classes=10 &
segments=(data_root="$images" model.backbone.init_cfg=None
  {train,test}_dataloader.dataset.data_prefix.{img_path=train,seg_map_path=annotations/train})
part upernet 140 30 "${own[@]}" train $segmentor $((steps / 3)) 2 2 "${segments[@]}" &
part masks 140 30 "${own[@]}" train $masks $((steps / 3)) 2 2 "${segments[@]}" &
part all_scales 140 40 "${own[@]}" all_scales $segmentor 2 2 2 "${segments[@]}" test_dataloader.dataset.indices=20 &
part features 140 30 "${own[@]}" train $features $((steps / 3)) "$small_batch" 2 data_root="$images" &
[[ $rehearse ]] || part lora 140 30 "${own[@]}" train configs/beit_v2/finetune_lora_in1k_30e.py $((steps / 3)) \
  "$small_batch" 2 data_root="$images" model.backbone.module.init_cfg=None model.head.num_classes=10 \
  model.data_preprocessor.num_classes=10 &
part float16 140 30 "${own[@]}" train $pretraining $((steps / 3)) $small_batch 2 "${data[@]}" \
  optim_wrapper.dtype=float16 &
part warm_finetune 140 40 "$python" $benchmarks/step.py finetune "${model[@]}" "${compile[@]}" \
  --only 'beit_mm compiled' &
trap 'kill $(jobs -p); exit 143' INT TERM
wait
summarize

# --- options that cost nothing to try; of `loss_` only what they learn is of interest ---
alone rounded_step 110 50 "${rounded[@]}" $benchmarks/step.py pretrain "${model[@]}" "${compile[@]}" --only beit_mm \
  --json "$RESULTS"
part loss_float32 120 50 "${own[@]}" train $pretraining $curve "$small_batch" 4 "${data[@]}" &
part loss_rounded 120 50 "${own[@]}" residual $pretraining $curve "$small_batch" 4 "${data[@]}" &
trap 'kill $(jobs -p); exit 143' INT TERM
wait
summarize
alone rotary_base 120 50 "$python" $benchmarks/step.py pretrain --rotary "${model[@]}" "${compile[@]}" --json "$RESULTS"
alone rotary_large 120 50 "$python" $benchmarks/step.py pretrain --rotary "${large[@]}" "${compile[@]}" --json "$RESULTS"
alone batches 120 60 "$python" $benchmarks/step.py pretrain "${many[@]}" "${compile[@]}" --only 'beit_mm compiled' \
  --json "$RESULTS"
alone autotune 240 150 "$python" $benchmarks/step.py pretrain "${model[@]}" "${autotune[@]}" \
  --only 'beit_mm compiled' --json "$RESULTS"

# --- speed of trainings and of more models ---
alone train_paper 75 25 "${own[@]}" train $paper $steps "$batch" "$workers" "${data[@]}"
alone train_compiled 110 40 "${own[@]}" train "$compiled" $steps "$batch" "$workers" "${data[@]}" \
  "${compiled_words[@]}"
alone train_features 75 30 "${own[@]}" train $features $steps "$batch" "$workers" data_root="$images"
alone train_features_compiled 110 40 "${own[@]}" train $features $steps "$batch" "$workers" data_root="$images" \
  "${compiled_words[@]}"
for name in "${!heads[@]}"; do
  alone head_$name 75 20 "${own[@]}" train "${heads[$name]}" $steps $head_batch "$workers" "${segments[@]}" \
    default_hooks.logger.interval=10
done
alone step_finetune 100 40 "$python" $benchmarks/step.py finetune "${model[@]}" "${compile[@]}" --waits \
  --profile $profile --traces "$out/traces" --json "$RESULTS"
alone segment 150 40 "$python" $benchmarks/segmentation.py "${segment[@]}" --only beit_mm mmseg \
  --parts scales train time memory --json "$RESULTS"
alone large_pretrain 180 60 "$python" $benchmarks/step.py pretrain "${large[@]}" "${compile[@]}" --json "$RESULTS"
alone large_finetune 75 40 "$python" $benchmarks/step.py finetune "${large[@]}" --json "$RESULTS"
[[ ${PHOTOS:-} ]] && alone photos 180 100 "${own[@]}" finetune "$PHOTOS" demo --minutes $minutes
# what these learn is of interest, their speed is not
if [[ ${PHOTOS:-} ]]; then
  for start in none_tokens demo_ema ${pays[@]+"${pays[@]}"}; do
    case ${start#*_} in
      tokens) options=(--tokenizer demo) ;;
      ema) options=(--targets features --teacher ema) ;;
      teacher) options=(--targets features --teacher "$TEACHER") ;;
    esac
    init=${start%_*}
    [[ $init == strong ]] && init=$TEACHER
    part start_$start 260 110 "${own[@]}" learn "$PHOTOS" "$init" "${options[@]}" "${learning[@]}" &
  done
fi
[[ ${LABEL_MAPS:-} ]] && part maps 180 100 "${own[@]}" finetune "$LABEL_MAPS" demo --minutes $minutes &
[[ ${LABEL_MAPS:-} && ! $rehearse ]] && part dinov2 180 100 "${own[@]}" finetune "$LABEL_MAPS" dinov2 --minutes $minutes &
wait
summarize
if [[ $rehearse ]]; then
  SMALL_IMAGES=$state/small.npz
  wanted hundred && [[ -d $images ]] && "$python" tools/dev/gpu/hundred_epochs.py pack "$images" "$SMALL_IMAGES"
fi
[[ ${SMALL_IMAGES:-} ]] && alone hundred 900 60 "$python" tools/dev/gpu/hundred_epochs.py run "$SMALL_IMAGES" "$small" \
  ${TEACHER:+--teacher "$TEACHER"} "${hundred[@]}"
[[ ${PHOTOS:-} && ${TEACHER:-} ]] && alone packaged 600 200 "${own[@]}" packaged "$PHOTOS" "$TEACHER" $taught
[[ ${PHOTOS:-} ]] && alone thousand 420 150 "${own[@]}" thousand "$PHOTOS" "$compiled" "${thousand[@]}" \
  "${compiled_words[@]}"
alone dino 75 40 "$python" $benchmarks/step.py dino "${dino[@]}" --json "$RESULTS"
alone graphs 120 80 "$python" $benchmarks/step.py pretrain "${model[@]}" "${graphs[@]}" --profile $profile \
  --only beit_mm 'beit_mm compiled' --json "$RESULTS"

say "done"
summarize
cat "$out/summary.txt"
grep -q 'exit ' "$status" || { echo "error: no part was run; PARTS=${PARTS:-}" >&2; exit 1; }
! grep -q 'exit [1-9]' "$status"
