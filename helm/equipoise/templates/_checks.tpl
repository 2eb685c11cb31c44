{{/* What a schema cannot say: values that contradict each other end the rendering with the remedy. */}}
{{- define "equipoise.checks" -}}
{{- $balancer := .Values.balancer -}}
{{- $shared := eq (include "equipoise.shared" .) "true" -}}
{{- if and $balancer.enabled (gt (int $balancer.replicas) 1) (not $shared) -}}
{{- fail (printf "balancer.replicas is %d, but several balancers need a store they share: set redis.url, redis.existingSecret.name or redis.trial.enabled" (int $balancer.replicas)) -}}
{{- end -}}
{{- if and $balancer.enabled (eq $balancer.lease "kubernetes") (not $shared) -}}
{{- fail "balancer.lease is kubernetes, but a single balancer with a file leads alone: set redis.url, redis.existingSecret.name or redis.trial.enabled" -}}
{{- end -}}
{{- if gt (add (ternary 1 0 .Values.redis.trial.enabled) (ternary 1 0 (ne .Values.redis.url "")) (ternary 1 0 (ne .Values.redis.existingSecret.name ""))) 1 -}}
{{- fail "redis.url, redis.existingSecret.name and redis.trial.enabled exclude each other: give one" -}}
{{- end -}}
{{- if and $balancer.storage.persistent $shared -}}
{{- fail "balancer.storage.persistent is for a balancer without Redis: turn one of them off" -}}
{{- end -}}
{{- if and (ne .Values.worker.kind "None") (lt (include "equipoise.spareRanks" . | int) 0) -}}
{{- fail (printf "worker.replicas (%d) x worker.slotsPerRank (%d) cannot hold worker.numExperts (%d): give more ranks or slots" (int .Values.worker.replicas) (int .Values.worker.slotsPerRank) (int .Values.worker.numExperts)) -}}
{{- end -}}
{{- if eq .Values.worker.port .Values.worker.rendezvousPort -}}
{{- fail "worker.port and worker.rendezvousPort must differ" -}}
{{- end -}}
{{- if and .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.autoscaling.minReplicas) (int .Values.gateway.autoscaling.maxReplicas)) -}}
{{- fail "gateway.autoscaling.minReplicas must be at most maxReplicas" -}}
{{- end -}}
{{- if and .Values.worker.checkpoint.volume (not .Values.worker.checkpoint.path) -}}
{{- fail "worker.checkpoint.volume is mounted, but worker.checkpoint.path does not say where in it the checkpoint is" -}}
{{- end -}}
{{- end -}}
