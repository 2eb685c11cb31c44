{{/* Checks that a schema cannot express: contradicting values fail the rendering with the remedy. */}}
{{- define "equipoise.checks" -}}
{{- $full := include "equipoise.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $full) -}}
{{- fail (printf "object names would begin with %s, but names of Services begin with a letter and have only lower-case letters, digits and dashes: set fullnameOverride, or use another release name than %s" $full .Release.Name) -}}
{{- end -}}
{{- $balancer := .Values.balancer -}}
{{- $shared := eq (include "equipoise.shared" .) "true" -}}
{{- if and $balancer.enabled (gt (int $balancer.replicas) 1) (not $shared) -}}
{{- fail (printf "balancer.replicas is %d, but several balancers need a shared store: set redis.url or redis.trial.enabled" (int $balancer.replicas)) -}}
{{- end -}}
{{- if and $balancer.enabled (eq $balancer.lease "kubernetes") (not $shared) -}}
{{- fail "balancer.lease is kubernetes, but leader election needs a shared store: set redis.url or redis.trial.enabled" -}}
{{- end -}}
{{- if and .Values.redis.trial.enabled .Values.redis.url -}}
{{- fail "redis.url and redis.trial.enabled are mutually exclusive: set one" -}}
{{- end -}}
{{- if and .Values.redis.existingSecret.name (not .Values.redis.url) -}}
{{- fail "redis.existingSecret.name is the password of redis.url: set both" -}}
{{- end -}}
{{- if and $balancer.storage.persistent $shared -}}
{{- fail "balancer.storage.persistent is for a balancer without Redis: disable one of them" -}}
{{- end -}}
{{- if ne .Values.worker.kind "None" -}}{{- include "equipoise.placeChecks" . -}}{{- end -}}
{{- if and (ne .Values.worker.kind "None") (lt (include "equipoise.spareRanks" . | int) 0) -}}
{{- fail (printf "worker.replicas (%d) x worker.slotsPerRank (%d) cannot hold worker.numExperts (%d)%s: add ranks or slots" (int .Values.worker.replicas) (int .Values.worker.slotsPerRank) (int .Values.worker.numExperts) (ternary " and the shared expert" "" .Values.worker.sharedAsRouted)) -}}
{{- end -}}
{{- if and .Values.worker.engine (ne .Values.worker.kind "None") -}}
{{- fail (printf "worker.engine is %s, whose pods are its own: set worker.kind to None" .Values.worker.engine) -}}
{{- end -}}
{{- if and .Values.worker.engine .Values.gateway.enabled -}}
{{- fail (printf "worker.engine is %s, which serves requests itself: set gateway.enabled to false" .Values.worker.engine) -}}
{{- end -}}
{{- include "equipoise.accountChecks" . -}}
{{- include "equipoise.localRankChecks" . -}}
{{- include "equipoise.portChecks" . -}}
{{- $range := .Values.networkPolicy -}}
{{- if gt (int $range.firstCollectivePort) (int $range.lastCollectivePort) -}}
{{- fail (printf "networkPolicy.firstCollectivePort (%d) must be at most lastCollectivePort (%d)" (int $range.firstCollectivePort) (int $range.lastCollectivePort)) -}}
{{- end -}}
{{- include "equipoise.phaseChecks" . -}}
{{- include "equipoise.hostNetworkChecks" . -}}
{{- if and .Values.policy.existingConfigMap (or .Values.policy.defaults .Values.policy.pools) -}}
{{- fail "policy.existingConfigMap and policy.defaults or policy.pools are mutually exclusive: keep the policy in one place" -}}
{{- end -}}
{{- if and .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.autoscaling.minReplicas) (int .Values.gateway.autoscaling.maxReplicas)) -}}
{{- fail "gateway.autoscaling.minReplicas must be at most maxReplicas" -}}
{{- end -}}
{{- include "equipoise.tlsChecks" . -}}
{{- include "equipoise.routeChecks" .Values.gateway -}}
{{- range $use := list "serviceMonitor" "podMonitor" "prometheusRule" "dashboard" "tls" -}}
{{- if and (index $.Values.metrics $use).enabled (not $.Values.metrics.enabled) -}}
{{- fail (printf "metrics.%s.enabled needs metrics.enabled" $use) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled .Values.metrics.podMonitor.enabled -}}
{{- fail "metrics.serviceMonitor and metrics.podMonitor together would scrape every process twice: enable one" -}}
{{- end -}}
{{- if and .Values.tokens.perWorkerSecret.name (not .Values.tokens.existingSecret.name) -}}
{{- fail "tokens.perWorkerSecret.name needs tokens.existingSecret.name, whose key `accepted` names the workers' keys" -}}
{{- end -}}
{{- if and .Values.worker.checkpoint.volume (not .Values.worker.checkpoint.path) -}}
{{- fail "worker.checkpoint.volume is set without worker.checkpoint.path: set the path of the checkpoint in the container" -}}
{{- end -}}
{{- include "equipoise.weightChecks" .Values.worker -}}
{{- include "equipoise.memoryCheck" . -}}
{{- end -}}

{{/* Places of a rank, as a balancer checks them, and those of all ranks. */}}
{{- define "equipoise.placeChecks" -}}
{{- $w := .Values.worker -}}
{{- if $w.places -}}
{{- $layers := include "equipoise.expertLayers" . | int64 -}}
{{- if eq $layers 0 -}}
{{- fail (printf "worker.places (%d) are for all MoE layers: set worker.numMoeLayers, or worker.checkpoint.model" (int64 $w.places)) -}}
{{- end -}}
{{- if or (lt (int64 $w.places) $layers) (gt (int64 $w.places) (mul $layers $w.slotsPerRank)) -}}
{{- fail (printf "worker.places (%d) must be from 1 to worker.slotsPerRank (%d) for each of %d MoE layers, so from %d to %d" (int64 $w.places) (int $w.slotsPerRank) $layers $layers (mul $layers $w.slotsPerRank)) -}}
{{- end -}}
{{- $experts := include "equipoise.placedExperts" $w | int64 -}}
{{- if lt (mul $w.replicas (int64 $w.places)) (mul $layers $experts) -}}
{{- fail (printf "worker.replicas (%d) x worker.places (%d) cannot hold %d experts in each of %d MoE layers: add ranks, or raise worker.places to %d" (int $w.replicas) (int64 $w.places) $experts $layers (div (add (mul $layers $experts) $w.replicas -1) $w.replicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Pods on the host network have the machine's address, so any host may reach them, and no podSelector admits them. */}}
{{- define "equipoise.hostNetworkChecks" -}}
{{- if and (ne .Values.worker.kind "None") .Values.worker.hostNetwork -}}
{{- if and .Values.insecure (not .Values.tls.enabled) (not .Values.tokens.existingSecret.name) -}}
{{- fail "worker.hostNetwork lets every host that reaches the machines call workers in plain text, because no NetworkPolicy applies to them: set tls.enabled, or at least tokens.existingSecret.name" -}}
{{- end -}}
{{- $addresses := false -}}
{{- range .Values.networkPolicy.balancerFrom -}}{{- if .ipBlock -}}{{- $addresses = true -}}{{- end -}}{{- end -}}
{{- if and .Values.balancer.enabled .Values.networkPolicy.enabled (not $addresses) -}}
{{- fail "worker.hostNetwork gives workers the addresses of their machines, which the NetworkPolicy keeps from the balancer: add an ipBlock of the machines to networkPolicy.balancerFrom" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A Role must not be bound to the account that other pods of the namespace have. */}}
{{- define "equipoise.accountChecks" -}}
{{- $bound := dict
  "balancer" (and .Values.balancer.enabled (eq (include "equipoise.balancerUsesCluster" .) "true"))
  "worker" (and (ne .Values.worker.kind "None") (eq .Values.worker.topology.source "nodeLabels")) -}}
{{- range $component, $is := $bound -}}
{{- $account := (index $.Values $component).serviceAccount -}}
{{- if and $is (not $account.create) (not $account.name) -}}
{{- fail (printf "%s.serviceAccount.create is false without a name, so every pod with the namespace's default account would get the role of the %s: set %s.serviceAccount.name" $component $component $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "equipoise.localRankChecks" -}}
{{- $worker := .Values.worker -}}
{{- if mod $worker.replicas $worker.localRanks -}}
{{- fail (printf "worker.replicas (%d) must be a multiple of worker.localRanks (%d), the ranks of a pod" (int $worker.replicas) (int $worker.localRanks)) -}}
{{- end -}}
{{- if gt (int $worker.localRanks) 1 -}}
{{- if or .Values.tls.certManager.csiDriver .Values.tokens.perWorkerSecret.name -}}
{{- fail "tls.certManager.csiDriver and tokens.perWorkerSecret give each pod an identity, but with worker.localRanks a pod has several workers: use the shared ones, or set worker.localRanks to 1" -}}
{{- end -}}
{{- if contains ":" $worker.device -}}
{{- fail (printf "worker.device %s is one GPU, but worker.localRanks is %d: set device to auto or cuda" $worker.device (int $worker.localRanks)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "equipoise.tlsChecks" -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.certManager.enabled (not $tls.enabled) -}}
{{- fail "tls.certManager.enabled creates certificates that nothing uses: set tls.enabled too" -}}
{{- end -}}
{{- if and $tls.certManager.csiDriver (or (not $tls.certManager.enabled) $tls.secrets.worker) -}}
{{- fail "tls.certManager.csiDriver issues the workers' certificates: set tls.certManager.enabled, and not tls.secrets.worker" -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name must name the Issuer or ClusterIssuer that signs this fleet's certificates" -}}
{{- end -}}
{{- if $tls.certManager.enabled -}}
{{- $renewed := include "equipoise.hours" $tls.certManager.renewBefore | float64 -}}
{{- if ge $renewed (include "equipoise.hours" $tls.certManager.duration | float64) -}}
{{- fail (printf "tls.certManager.renewBefore (%s) must be less than duration (%s), or certificates are renewed all the time: lower it" $tls.certManager.renewBefore $tls.certManager.duration) -}}
{{- end -}}
{{- $rule := .Values.metrics.prometheusRule -}}
{{- if and $rule.enabled (ge (float64 $rule.thresholds.certificateHours) $renewed) -}}
{{- fail (printf "metrics.prometheusRule.thresholds.certificateHours (%v) must be less than tls.certManager.renewBefore (%s), or EquipoiseCertificateExpires fires before each renewal: lower it, or raise renewBefore" $rule.thresholds.certificateHours $tls.certManager.renewBefore) -}}
{{- end -}}
{{- end -}}
{{- if and $tls.enabled (not $tls.balancerName) (not .Values.balancer.enabled) (regexMatch ":.*:" .Values.balancer.externalAddress) -}}
{{- fail (printf "balancer.externalAddress is %s, an IPv6 address, which gives no name to verify: set tls.balancerName to a name in the balancer's certificate" .Values.balancer.externalAddress) -}}
{{- end -}}
{{- if and $tls.enabled (eq (include "equipoise.tlsBalancerName" .) (include "equipoise.tlsWorkerName" .)) -}}
{{- fail "tls.balancerName and tls.workerName must differ: they distinguish the roles of servers" -}}
{{- end -}}
{{- if and .Values.metrics.tls.enabled (not $tls.enabled) -}}
{{- fail "metrics.tls.enabled needs tls.enabled: the metrics use its certificates" -}}
{{- end -}}
{{- $monitored := or .Values.metrics.serviceMonitor.enabled .Values.metrics.podMonitor.enabled -}}
{{- $issued := or .Values.balancer.enabled .Values.gateway.enabled .Values.tests.enabled -}}
{{- if and .Values.metrics.tls.enabled $monitored $tls.certManager.csiDriver (not $issued) -}}
{{- fail "no Secret of this release contains the authority that scrapers verify: enable the gateway or tests, or disable tls.certManager.csiDriver, metrics.tls or the monitors" -}}
{{- end -}}
{{- $needed := dict "balancer" .Values.balancer.enabled "worker" (or (ne .Values.worker.kind "None") .Values.worker.engine) "gateway" (or .Values.gateway.enabled .Values.tests.enabled) -}}
{{- range $as, $is := $needed -}}
{{- if and $tls.enabled $is (not $tls.certManager.enabled) (not (index $tls.secrets $as)) -}}
{{- fail (printf "tls.enabled requires a certificate for the %s: name its Secret in tls.secrets.%s, or set tls.certManager.enabled" $as $as) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A duration such as 1h30m in hours. */}}
{{- define "equipoise.hours" -}}
{{- $hours := 0.0 -}}
{{- range regexFindAll "[0-9]+[hms]" . -1 -}}
{{- $unit := get (dict "h" 1.0 "m" 60.0 "s" 3600.0) (trimAll "0123456789" .) -}}
{{- $hours = addf $hours (divf (float64 (trimAll "hms" .)) $unit) -}}
{{- end -}}
{{- $hours -}}
{{- end -}}

{{- define "equipoise.routeChecks" -}}
{{- if and .httpRoute.enabled (not .httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.parentRefs must name the Gateway that serves the route" -}}
{{- end -}}
{{- if and .inferencePool.enabled (not .inferencePool.endpointPicker.name) -}}
{{- fail "gateway.inferencePool.endpointPicker.name must name the Service of the endpoint picker" -}}
{{- end -}}
{{- if and .ingress.enabled .ingress.tlsSecret (not .ingress.hosts) -}}
{{- fail "gateway.ingress.tlsSecret is the certificate of gateway.ingress.hosts: name them" -}}
{{- end -}}
{{- end -}}

{{- define "equipoise.phaseChecks" -}}
{{- if has .Values.pool .Values.peerPools -}}
{{- fail (printf "peerPools lists this release's own pool %s: name the pools of other releases" .Values.pool) -}}
{{- end -}}
{{- with .Values.prefillPool -}}
{{- if eq $.Values.phase "prefill" -}}
{{- fail (printf "prefillPool is %s, but this release's own pool has phase prefill: set prefillPool in the decode pool's release" .) -}}
{{- end -}}
{{- if not (has . $.Values.peerPools) -}}
{{- fail (printf "prefillPool is %s, but peerPools does not list it, so no worker would fetch its latents: add it to peerPools" .) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.peerPools .Values.tls.enabled (not .Values.tls.workerName) -}}
{{- fail "peerPools needs tls.workerName, because pools verify each other's workers by one name: set the same in all their releases" -}}
{{- end -}}
{{- end -}}

{{- define "equipoise.weightChecks" -}}
{{- $weights := include "equipoise.workerWeights" . -}}
{{- if and (eq $weights "fp8") (eq (include "equipoise.workerBatchInvariant" .) "true") -}}
{{- fail "worker.batchInvariant is not available with FP8 weights: set it to auto or false, or worker.weights to bf16" -}}
{{- end -}}
{{- if and .sumsOnNodes (eq (include "equipoise.workerBatchInvariant" .) "true") -}}
{{- fail "worker.sumsOnNodes makes results depend on the layout: set worker.batchInvariant to false, or sumsOnNodes to false" -}}
{{- end -}}
{{- if and (eq .latents "fp8") (ne $weights "fp8") -}}
{{- fail "worker.latents fp8 needs FP8 weights: set worker.weights to fp8 or worker.gpu.count to 1" -}}
{{- end -}}
{{- if and .gpu.count (eq .device "cpu") -}}
{{- fail "worker.device is cpu, but worker.gpu.count requests a GPU: set device to auto, or gpu.count to 0" -}}
{{- end -}}
{{- if lt (int .maxStepTokens) (int .maxRequests) -}}
{{- fail (printf "worker.maxStepTokens (%d) must be at least worker.maxRequests (%d): a step has a token for each request" (int .maxStepTokens) (int .maxRequests)) -}}
{{- end -}}
{{- if and .cacheTokens (lt (int64 .cacheTokens) (int64 .contextLength)) -}}
{{- fail (printf "worker.cacheTokens (%d) must be at least worker.contextLength (%d), the length of one request, or 0" (int64 .cacheTokens) (int64 .contextLength)) -}}
{{- end -}}
{{- end -}}

{{/* Ports of one pod must differ. Numbers of --set are int64, those of files float64. */}}
{{- define "equipoise.portChecks" -}}
{{- $pods := dict
  "balancer" (dict "balancer.port" .Values.balancer.port "the page's port" 7080 "the probes' port" 9091)
  "worker" (dict "worker.port" .Values.worker.port "worker.rendezvousPort" .Values.worker.rendezvousPort "the probes' port" 9091)
  "gateway" (dict "gateway.port" .Values.gateway.port) -}}
{{- $metrics := .Values.metrics -}}
{{- $worker := .Values.worker -}}
{{- range $pod, $ports := $pods -}}
{{- if $metrics.enabled -}}{{- $_ := set $ports "metrics.port" $metrics.port -}}{{- end -}}
{{- $taken := dict -}}
{{- $ranks := ternary (int $worker.localRanks) 1 (eq $pod "worker") -}}
{{- range $name, $port := $ports -}}
{{/* The process that starts a pod's ranks answers probes, too. */}}
{{- $count := ternary (add $ranks 1) $ranks (and (gt $ranks 1) (eq $name "the probes' port")) -}}
{{- range $rank := until (int $count) -}}
{{- $number := add $port (mul 10 $rank) | toString -}}
{{- if hasKey $taken $number -}}
{{- fail (printf "%s and %s of a %s are both %s: they must differ%s" (index $taken $number) $name $pod $number (ternary ", and each rank's are 10 higher" "" (gt $ranks 1))) -}}
{{- end -}}
{{- $_ := set $taken $number $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
