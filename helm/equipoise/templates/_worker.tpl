{{/* The pod of one rank or several, for any kind of workload. Takes (dict "root" $ "component" "worker" "as" "worker" "pod" .Values.worker). */}}
{{- define "equipoise.workerPod" -}}
{{- $root := .root }}
{{- $worker := .root.Values.worker }}
{{- $topology := $worker.topology }}
{{- $probe := dict "root" $root "port" $worker.port "several" (gt (int $worker.localRanks) 1) }}
{{ include "equipoise.podMetadata" . }}
spec:
  serviceAccountName: {{ include "equipoise.serviceAccountName" . | quote }}
  automountServiceAccountToken: {{ eq $topology.source "nodeLabels" }}
  # Graceful shutdown: it rejects new requests, finishes those in flight, waits until its latents are
  # fetched, and leaves the epoch.
  terminationGracePeriodSeconds: {{ add $worker.drainTimeoutSeconds (ternary (int (ceil $worker.holdSeconds)) 0 (not (empty $root.Values.peerPools))) 20 }}
  {{- include "equipoise.podSecurity" $root | nindent 2 }}
  {{- if $worker.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $worker.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $worker.extraInitContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      {{- include "equipoise.image" (dict "root" $root "image" $root.Values.image.worker) | nindent 6 }}
      command: {{ toJson $worker.command }}
      args:
        - worker
        - --balancer={{ include "equipoise.balancerAddress" $root }}
        - {{ printf "--pool=%s" $root.Values.pool | quote }}
        - --phase={{ $root.Values.phase }}
        {{- with $root.Values.peerPools }}
        - {{ printf "--peer-pools=%s" (join "," .) | quote }}
        - --hold-s={{ $worker.holdSeconds }}
        {{- end }}
        - --worker=$(POD_NAME)
        - --listen=0.0.0.0:{{ $worker.port }}
        {{- with include "equipoise.tokensFlag" $root | trim }}{{ . | nindent 8 }}{{ end }}
        - --advertise-host=$(POD_IP)
        - --rendezvous-port={{ $worker.rendezvousPort }}
        - --host=$(NODE_NAME)
        {{- if eq $topology.source "podLabels" }}
        - --node=$(FAST_DOMAIN)
        - --zone=$(ZONE)
        {{- else if eq $topology.source "nodeLabels" }}
        - {{ printf "--node-label=%s" $topology.nodeLabel | quote }}
        - {{ printf "--zone-label=%s" $topology.zoneLabel | quote }}
        {{- end }}
        {{- with $worker.checkpoint.path }}
        - {{ printf "--checkpoint=%s" . | quote }}
        {{- end }}
        - --num-ranks={{ $worker.replicas }}
        {{- if gt (int $worker.localRanks) 1 }}
        - --local-ranks={{ $worker.localRanks }}
        {{- end }}
        - --slots-per-rank={{ $worker.slotsPerRank }}
        - --places={{ int64 $worker.places }}
        {{- if $worker.sharedAsRouted }}
        - --shared-as-routed
        {{- end }}
        - --max-requests={{ int64 $worker.maxRequests }}
        - --max-queued-requests={{ int64 $worker.maxQueuedRequests }}
        - --context-length={{ int64 $worker.contextLength }}
        - --{{ ternary "" "no-" (eq (include "equipoise.workerBatchInvariant" $worker) "true") }}batch-invariant
        - --max-step-tokens={{ int64 $worker.maxStepTokens }}
        - --micro-batches={{ $worker.microBatches }}
        - --cut-from-tokens={{ int64 $worker.cutFromTokens }}
        - --hops={{ $worker.hops }}
        {{- if $worker.sumsOnNodes }}
        - --sums-on-nodes
        {{- end }}
        - --replica-choice={{ $worker.replicaChoice }}
        - --device={{ include "equipoise.workerDevice" $worker }}
        - --weights={{ include "equipoise.workerWeights" $worker }}
        - --latents={{ $worker.latents }}
        - --cache-tokens={{ int64 $worker.cacheTokens }}
        - --spare-slots={{ $worker.spareSlots }}
        - --speculate={{ $worker.speculate }}
        - --max-graph-rows={{ int64 $worker.maxGraphRows }}
        {{- if $worker.pullMiBPerSecond }}
        - --pull-mib-per-s={{ $worker.pullMiBPerSecond }}
        {{- end }}
        - --step-timeout-s={{ $worker.stepTimeoutSeconds }}
        - --outage-timeout-s={{ $worker.outageTimeoutSeconds }}
        - --drain-timeout-s={{ $worker.drainTimeoutSeconds }}
        {{- include "equipoise.commonFlags" . | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: NODE_NAME
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        {{- if eq $topology.source "podLabels" }}
        - name: ZONE
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ $topology.zoneLabel }}']"}}
        - name: FAST_DOMAIN
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ $topology.nodeLabel }}']"}}
        {{- end }}
        {{- include "equipoise.commonEnv" . | nindent 8 }}
      ports:
        {{- range include "equipoise.workerPorts" $root | fromYamlArray }}
        - {name: {{ .name }}, containerPort: {{ .port }}}
        {{- end }}
        {{- include "equipoise.probesContainerPort" $root | nindent 8 }}
      # `live` is SERVING once the checkpoint is loaded; the other services only within an epoch.
      startupProbe:
        {{- include "equipoise.probe" (merge (dict "service" "live" "path" "/livez") $probe) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $worker.startupTimeoutSeconds 4) 5 }}
      readinessProbe:
        {{- with $worker.readinessProbe }}
        {{- toYaml . | nindent 8 }}
        {{- else }}
        {{- include "equipoise.probe" (merge (dict "service" "equipoise_api.v1.Inference" "path" "/readyz") $probe) | nindent 8 }}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
        {{- end }}
      # Lenient, because a restart costs two epochs and peers detect a hung rank themselves.
      livenessProbe:
        {{- include "equipoise.probe" (merge (dict "service" "live" "path" "/livez") $probe) | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      resources:
        {{- include "equipoise.workerResources" $worker | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if $worker.rdma.resourceName }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- with include "equipoise.trustMounts" . | trim }}{{ . | nindent 8 }}{{ end }}
        {{- if $worker.checkpoint.volume }}
        - {name: checkpoint, mountPath: {{ $worker.checkpoint.mountPath | quote }}, readOnly: true}
        {{- end }}
        {{- with $worker.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $worker.sharedMemorySize }}}
    {{- with include "equipoise.trustVolumes" . | trim }}{{ . | nindent 4 }}{{ end }}
    {{- with $worker.checkpoint.volume }}
    - name: checkpoint
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $worker.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $worker.topologySpread }}
  {{- if .enabled }}
  topologySpreadConstraints:
    - topologyKey: {{ .topologyKey | quote }}
      maxSkew: {{ .maxSkew }}
      whenUnsatisfiable: {{ .whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "equipoise.selector" $ | nindent 10 }}
  {{- end }}
  {{- end }}
  {{- include "equipoise.scheduling" . | nindent 2 }}
{{- end -}}

{{/* The ports of a pod's ranks other than probes, each 10 higher than that of the previous rank, with
"kind", "name" and "port". Names are those of the first rank with the number of the rank. Takes the root. */}}
{{- define "equipoise.workerPorts" -}}
{{- $worker := .Values.worker -}}
{{- $first := dict "grpc" $worker.port "rendezvous" $worker.rendezvousPort -}}
{{- if .Values.metrics.enabled -}}{{- $_ := set $first "metrics" .Values.metrics.port -}}{{- end -}}
{{- $ports := list -}}
{{- range $rank := until (int $worker.localRanks) -}}
{{- range $kind, $port := $first -}}
{{- $ports = append $ports (dict "kind" $kind "name" (ternary (printf "%s-%d" $kind $rank) $kind (gt $rank 0)) "rank" $rank "port" (add $port (mul 10 $rank))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end -}}

{{/* CPU and memory with GPU and RDMA, whose requests equal their limits. Takes .Values.worker. */}}
{{- define "equipoise.workerResources" -}}
{{- $devices := dict -}}
{{- if .gpu.count -}}{{- $_ := set $devices .gpu.resourceName (mul .gpu.count .localRanks) -}}{{- end -}}
{{- if .rdma.resourceName -}}{{- $_ := set $devices .rdma.resourceName (mul .rdma.count .localRanks) -}}{{- end -}}
{{- $resources := deepCopy (default dict .resources) -}}
{{- range .resourceClaims -}}
{{- $_ := set $resources "claims" (append (default list $resources.claims) (dict "name" .name)) -}}
{{- end -}}
{{- if $devices -}}
{{- $_ := set $resources "limits" (merge (deepCopy (default dict $resources.limits)) $devices) -}}
{{- $_ := set $resources "requests" (merge (deepCopy (default dict $resources.requests)) $devices) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* What `auto` means. Take .Values.worker. A GPU rank is asked for its GPU and for FP8 by name, so that it stops without them. */}}
{{- define "equipoise.workerDevice" -}}
{{- if ne .device "auto" -}}{{ .device }}{{- else -}}{{ ternary "cuda" "cpu" (gt (int .gpu.count) 0) }}{{- end -}}
{{- end -}}

{{- define "equipoise.workerWeights" -}}
{{- if and (eq .weights "auto") (gt (int .gpu.count) 0) -}}fp8{{- else -}}{{ .weights }}{{- end -}}
{{- end -}}

{{- define "equipoise.workerBatchInvariant" -}}
{{- if kindIs "bool" .batchInvariant -}}{{ .batchInvariant }}{{- else -}}{{ ne (include "equipoise.workerWeights" .) "fp8" }}{{- end -}}
{{- end -}}
