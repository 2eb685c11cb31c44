{{/* The memory of a rank as `equipoise worker --explain` computes it (model/equipoise_model/memory.py), from the sizes in files/models.yaml. */}}
{{- define "equipoise.memoryCheck" -}}
{{- $w := .Values.worker -}}
{{- if and (gt (int $w.gpu.count) 0) $w.gpu.memoryGiB $w.checkpoint.model (eq (include "equipoise.workerWeights" $w) "fp8") -}}
{{- $model := index (.Files.Get "files/models.yaml" | fromYaml) $w.checkpoint.model -}}
{{- $ranks := int64 $w.replicas -}}
{{- $slots := int64 $w.slotsPerRank -}}
{{- $least := min $slots (div (add (include "equipoise.placedExperts" $w | int64) $ranks -1) $ranks) -}}
{{- $remedy := "worker.slotsPerRank" -}}
{{- $denseBytes := int64 $model.denseBytes -}}
{{- $slotBytes := int64 $model.slotBytes -}}
{{- $blockBytes := mul 64 (int64 (index $model.latentBytes $w.latents)) -}}
{{- if gt (int64 $w.speculate) 0 -}}
{{- $denseBytes = add $denseBytes (int64 $model.draftDenseBytes) -}}
{{- $slotBytes = add $slotBytes (int64 $model.draftSlotBytes) -}}
{{- $blockBytes = add $blockBytes (mul 64 (int64 (index $model.draftLatentBytes $w.latents))) -}}
{{- end -}}
{{/* A routed shared expert is in slots only. */}}
{{- if $w.sharedAsRouted -}}{{- $denseBytes = sub $denseBytes $slotBytes -}}{{- end -}}
{{/* Experts that a rank holds, and the bytes of each: in all layers, or with places in one. */}}
{{- $held := $slots -}}
{{- if $w.places -}}
{{- $layers := include "equipoise.expertLayers" . | int64 -}}
{{- $held = int64 $w.places -}}
{{- $least = div (add (mul $layers (include "equipoise.placedExperts" $w | int64)) $ranks -1) $ranks -}}
{{- $slotBytes = div $slotBytes $layers -}}
{{- $remedy = "worker.places" -}}
{{- end -}}
{{/* Blocks of 64 positions. */}}
{{- $perRequest := div (add (int64 $w.contextLength) 63) 64 -}}
{{- $blocks := add 1 (mul (int64 $w.maxRequests) $perRequest) -}}
{{- if $w.cacheTokens -}}{{- $blocks = add 1 (div (add (int64 $w.cacheTokens) 63) 64) -}}{{- end -}}
{{/* The worker drafts for up to 4 requests at a time. */}}
{{- $drafting := mul (min 4 (int64 $w.maxRequests)) (add 1 (int64 $w.speculate)) -}}
{{- $graphRows := min (int64 $w.maxGraphRows) (max (int64 $w.maxRequests) $drafting) -}}
{{- $room := max $graphRows (min (int64 $w.maxStepTokens) 256) -}}
{{- $exchange := 0 -}}
{{- if gt $ranks 1 -}}{{- $exchange = mul 4 $ranks $slots $room (int64 $model.messageBytes) -}}{{- end -}}
{{- $step := dict "model" $model "worker" $w "room" $room -}}
{{- $graphs := 0 -}}
{{- if gt $graphRows 0 -}}{{- $graphs = include "equipoise.stepBytes" (merge (dict "rows" $graphRows "captured" true) $step) | int64 -}}{{- end -}}
{{- $activations := include "equipoise.stepBytes" (merge (dict "rows" (int64 $w.maxStepTokens)) $step) | int64 -}}
{{- $smallest := include "equipoise.stepBytes" (merge (dict "rows" (min (int64 $w.maxStepTokens) (int64 $w.maxRequests))) $step) | int64 -}}
{{- $terms := list
  (dict "name" "dense weights" "bytes" $denseBytes "least" $denseBytes "remedy" "")
  (dict "name" "experts" "bytes" (mul $held $slotBytes) "least" (mul $least $slotBytes) "remedy" $remedy)
  (dict "name" "staging slots" "bytes" (mul (int64 $w.spareSlots) $slotBytes) "least" 0 "remedy" "worker.spareSlots")
  (dict "name" "latents" "bytes" (mul $blocks $blockBytes) "least" (mul (min $blocks (add 1 $perRequest)) $blockBytes) "remedy" "worker.cacheTokens, maxRequests or contextLength")
  (dict "name" "exchange buffers" "bytes" $exchange "least" $exchange "remedy" "")
  (dict "name" "activations" "bytes" $activations "least" $smallest "remedy" "worker.maxStepTokens")
  (dict "name" "graphs" "bytes" $graphs "least" 0 "remedy" "worker.maxGraphRows")
  (dict "name" "CUDA runtime" "bytes" (int64 $model.allowanceBytes) "least" (int64 $model.allowanceBytes) "remedy" "") -}}
{{- $needed := 0 -}}
{{- $largest := dict "bytes" 0 "least" 0 -}}
{{- $all := list -}}
{{- range $terms -}}
{{- $needed = add $needed .bytes -}}
{{- $all = append $all (printf "%s %s" .name (include "equipoise.gib" .bytes)) -}}
{{- if gt (sub .bytes .least) (sub $largest.bytes $largest.least) -}}{{- $largest = . -}}{{- end -}}
{{- end -}}
{{- $capacity := floor (mulf $w.gpu.memoryGiB 1073741824) | int64 -}}
{{- if gt $needed $capacity -}}
{{- $remedy = "add ranks, or use GPUs with more memory" -}}
{{- if $largest.bytes -}}{{- $remedy = printf "lower %s (%s can shrink the most), add ranks, or use GPUs with more memory" $largest.remedy $largest.name -}}{{- end -}}
{{- fail (printf "a rank needs %s, more than worker.gpu.memoryGiB (%s): %s. Remedy: %s" (include "equipoise.gib" $needed) (include "equipoise.gib" $capacity) (join ", " $all) $remedy) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The estimated activations of a step of "rows" rows on every rank, without logits if it is "captured". Takes "model", "worker" and "room", the exchange's rows. */}}
{{- define "equipoise.stepBytes" -}}
{{- $w := .worker -}}
{{- $rows := int64 .rows -}}
{{/* Partial results of attention: FlashMLA's, or Triton's for as many rows as have the most. */}}
{{- $partial := add $rows (int64 .model.libraryPrograms) -}}
{{- range .model.splits -}}
{{- $splits := div (add (int64 $w.contextLength) (int64 .positions) -1) (int64 .positions) -}}
{{- $most := $rows -}}
{{- if .rows -}}{{- $most = min $rows (int64 .rows) -}}{{- end -}}
{{- if gt $splits 1 -}}{{- $partial = max $partial (mul $most $splits) -}}{{- end -}}
{{- end -}}
{{/* Keys and values of up to 4096 positions are rebuilt for long prompts. */}}
{{- $rebuilt := 0 -}}
{{- if ge $rows (int64 .model.expandedRows) -}}
{{- $rebuilt = mul (min 4096 (max $rows (int64 $w.contextLength))) (int64 .model.rebuiltBytes) -}}
{{- end -}}
{{- $attention := add (mul $rows (int64 .model.attentionBytes)) (mul $partial (int64 .model.partialBytes)) $rebuilt -}}
{{- $atOnce := $rows -}}
{{- if gt (int64 $w.replicas) 1 -}}{{- $atOnce = min $rows .room -}}{{- end -}}
{{- $pairs := min (add (int64 .model.choices) (ternary 1 0 $w.sharedAsRouted)) (int64 $w.slotsPerRank) -}}
{{- $expertRows := add (mul (int64 $w.replicas) $atOnce $pairs) (mul (int64 $w.slotsPerRank) 128) -}}
{{- $widest := max $attention (mul $expertRows (int64 .model.expertRowBytes)) -}}
{{- $logits := 0 -}}
{{- if not .captured -}}
{{- $sampled := min $rows (add (mul (int64 $w.maxRequests) (add 1 (int64 $w.speculate))) (int64 .model.scoredRows)) -}}
{{- $widest = max $widest (mul (min $sampled (int64 .model.rowsAtOnce)) (int64 .model.samplingBytes)) -}}
{{- $logits = mul $sampled (int64 .model.logitBytes) -}}
{{- end -}}
{{- add (mul $rows (int64 .model.residualBytes)) $widest $logits -}}
{{- end -}}

{{- define "equipoise.gib" -}}
{{- printf "%.1f GiB" (divf (float64 .) 1073741824) -}}
{{- end -}}
