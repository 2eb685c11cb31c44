{{/* What several objects share. Templates about one component take (dict "root" $ "component" "…" "pod" .Values.…);
"component" is its label, "pod" its values. */}}

{{- define "equipoise.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "equipoise.fullname" -}}
{{- $name := include "equipoise.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- with .Values.fullnameOverride -}}{{- $full = . -}}{{- end -}}
{{/* A hash keeps long names apart that begin alike. */}}
{{- if gt (len $full) 40 -}}
{{- $full = printf "%s-%s" ($full | trunc 33 | trimSuffix "-") (sha256sum $full | trunc 6) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* Selector labels of Services and workloads; immutable. */}}
{{- define "equipoise.selector" -}}
app.kubernetes.io/name: {{ include "equipoise.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of pods. A change of one restarts the pods, so those of versions are not among them. Each key once: the chart's
own labels win over those of values. "labels" is optional. */}}
{{- define "equipoise.podLabels" -}}
{{- $own := include "equipoise.selector" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "equipoise" -}}
{{- if has .component (list "worker" "gateway") -}}
{{- $_ := set $own "equipoise.dev/pool" (include "equipoise.poolLabel" .root.Values.pool) -}}
{{- end -}}
{{- merge $own (deepCopy (default dict .labels)) | toYaml -}}
{{- end -}}

{{/* Labels of objects: those of pods and more. */}}
{{- define "equipoise.labels" -}}
{{- $own := include "equipoise.podLabels" (omit . "labels") | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- merge $own (deepCopy (default dict .labels)) (deepCopy (default dict .root.Values.commonLabels)) | toYaml -}}
{{- end -}}

{{/* A pool's name as a label: itself, or a hash of a name that no label can hold. */}}
{{- define "equipoise.poolLabel" -}}
{{- if regexMatch "^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$" . -}}{{ . }}{{- else -}}{{ sha256sum . | trunc 63 }}{{- end -}}
{{- end -}}

{{/* Metadata of an object. Optional: "name" (default: the release's name and the component), "labels" to add, and
"annotations". */}}
{{- define "equipoise.metadata" -}}
metadata:
  name: {{ .name | default (printf "%s-%s" (include "equipoise.fullname" .root) .component) | quote }}
  {{- if not (hasPrefix "Cluster" (default "" .kind)) }}
  namespace: {{ .root.Release.Namespace | quote }}
  {{- end }}
  labels:
    {{- include "equipoise.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "equipoise.podMetadata" -}}
metadata:
  labels:
    {{- include "equipoise.podLabels" (merge (dict "labels" .pod.podLabels) .) | nindent 4 }}
  {{- with .pod.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Takes (dict "root" $ "image" .Values.image.…). */}}
{{- define "equipoise.image" -}}
image: "{{ .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end -}}

{{- define "equipoise.serviceAccountName" -}}
{{- $account := .pod.serviceAccount -}}
{{- $account.name | default (ternary (printf "%s-%s" (include "equipoise.fullname" .root) .component) "default" $account.create) -}}
{{- end -}}

{{- define "equipoise.serviceAccount" -}}
{{- if .pod.serviceAccount.create }}
apiVersion: v1
kind: ServiceAccount
{{ include "equipoise.metadata" (merge (dict "name" (include "equipoise.serviceAccountName" .) "annotations" .pod.serviceAccount.annotations) .) }}
automountServiceAccountToken: false
---
{{- end }}
{{- end -}}

{{/* Binds a Role or ClusterRole to the component's service account. Takes "kind" and "name" of the role too. */}}
{{- define "equipoise.roleBinding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
{{ include "equipoise.metadata" . }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name | quote }}
subjects:
  - kind: ServiceAccount
    name: {{ include "equipoise.serviceAccountName" . | quote }}
    namespace: {{ .root.Release.Namespace | quote }}
{{- end -}}

{{/* Takes "port" too, the name of the only port other than metrics. */}}
{{- define "equipoise.service" -}}
---
apiVersion: v1
kind: Service
{{ include "equipoise.metadata" (merge (dict "annotations" .pod.service.annotations) .) }}
spec:
  type: {{ .pod.service.type }}
  selector:
    {{- include "equipoise.selector" . | nindent 4 }}
  ports:
    - {name: {{ .port }}, port: {{ .pod.port }}, targetPort: {{ .port }}, appProtocol: {{ .port }}}
    {{- include "equipoise.metricsServicePort" .root | nindent 4 }}
{{- end -}}

{{- define "equipoise.metricsServicePort" -}}
{{- if .Values.metrics.enabled -}}
- {name: metrics, port: {{ .Values.metrics.port }}, targetPort: metrics}
{{- end -}}
{{- end -}}

{{- define "equipoise.metricsContainerPort" -}}
{{- if .Values.metrics.enabled -}}
- {name: metrics, containerPort: {{ .Values.metrics.port }}}
{{- end -}}
{{- end -}}

{{/* For the kubelet only: neither a Service nor a NetworkPolicy names it. */}}
{{- define "equipoise.probesContainerPort" -}}
- {name: probes, containerPort: 9091}
{{- end -}}

{{/* Takes "maxUnavailable" too. */}}
{{- define "equipoise.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "equipoise.metadata" . }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  selector:
    matchLabels:
      {{- include "equipoise.selector" . | nindent 6 }}
{{- end -}}

{{/* host:port of the balancer. A follower redirects workers to the leader. */}}
{{- define "equipoise.balancerAddress" -}}
{{- if .Values.balancer.enabled -}}
{{ include "equipoise.fullname" . }}-balancer.{{ .Release.Namespace }}.svc:{{ .Values.balancer.port }}
{{- else -}}
{{ required "balancer.externalAddress must name the balancer to use where balancer.enabled is false" .Values.balancer.externalAddress }}
{{- end -}}
{{- end -}}

{{/* "true" if balancers share a Redis. */}}
{{- define "equipoise.shared" -}}
{{- if or .Values.redis.trial.enabled .Values.redis.url -}}true{{- end -}}
{{- end -}}

{{/* Leader election: store or kubernetes. Not by the number of replicas: while it changes, old and new balancers would win
two different leases. */}}
{{- define "equipoise.lease" -}}
{{- if ne .Values.balancer.lease "auto" -}}
{{ .Values.balancer.lease }}
{{- else -}}
{{ ternary "kubernetes" "store" (eq (include "equipoise.shared" .) "true") }}
{{- end -}}
{{- end -}}

{{/* Experts per layer that need a slot. Takes the worker's values. */}}
{{- define "equipoise.placedExperts" -}}
{{ add .numExperts (ternary 1 0 .sharedAsRouted) }}
{{- end -}}

{{/* MoE layers with experts, those of draft tokens included; 0 if unknown. */}}
{{- define "equipoise.expertLayers" -}}
{{- $w := .Values.worker -}}
{{- $layers := int64 $w.numMoeLayers -}}
{{- with $w.checkpoint.model -}}
{{- $model := index ($.Files.Get "files/models.yaml" | fromYaml) . -}}
{{- $layers = add (int64 $model.layers) (ternary (int64 $model.draftLayers) 0 (gt (int64 $w.speculate) 0)) -}}
{{- end -}}
{{ $layers }}
{{- end -}}

{{/* The number of ranks that may be missing while the others hold every expert. */}}
{{- define "equipoise.spareRanks" -}}
{{- $w := .Values.worker -}}
{{- $experts := include "equipoise.placedExperts" $w | int64 -}}
{{- $needed := div (add $experts $w.slotsPerRank -1) $w.slotsPerRank -}}
{{- if $w.places -}}
{{- $inAll := mul $experts (include "equipoise.expertLayers" . | int64) -}}
{{- $needed = max $needed (div (add $inAll (int64 $w.places) -1) (int64 $w.places)) -}}
{{- end -}}
{{- sub $w.replicas $needed -}}
{{- end -}}

{{/* The number of pods whose ranks may be missing. */}}
{{- define "equipoise.sparePods" -}}
{{- div (include "equipoise.spareRanks" . | int) .Values.worker.localRanks -}}
{{- end -}}

{{/* Update strategy: RollingUpdate or OnDelete. */}}
{{- define "equipoise.workerUpdateStrategy" -}}
{{- if ne .Values.worker.updateStrategy "auto" -}}
{{ .Values.worker.updateStrategy }}
{{- else -}}
{{ ternary "RollingUpdate" "OnDelete" (gt (include "equipoise.sparePods" . | int) 0) }}
{{- end -}}
{{- end -}}

{{/* Security of all pods: not root, read-only image. */}}
{{- define "equipoise.podSecurity" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.runAsUser }}
  runAsGroup: {{ int64 .Values.runAsUser }}
  fsGroup: {{ int64 .Values.runAsUser }}
  # Large volumes are not walked at every start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "equipoise.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* The last flags of a component. */}}
{{- define "equipoise.commonFlags" -}}
- --log-format={{ .pod.logFormat }}
{{- if .root.Values.metrics.enabled }}
- --metrics-listen=0.0.0.0:{{ .root.Values.metrics.port }}
{{- if .root.Values.metrics.tls.enabled }}
- --metrics-tls
{{- end }}
{{- if .root.Values.metrics.tokenSecret.name }}
- --metrics-token-file=/etc/equipoise/metrics/token
{{- end }}
{{- end }}
{{- if has .component (list "balancer" "worker") }}
- --probes-listen=0.0.0.0:9091
{{- end }}
{{- range .pod.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The last variables of a component. */}}
{{- define "equipoise.commonEnv" -}}
- {name: HOME, value: /tmp}
{{- include "equipoise.trustEnv" . }}
{{- if has .component (list "balancer" "worker") }}
{{- with .root.Values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- with .pod.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "equipoise.scheduling" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .pod.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "equipoise.spreadOverHosts" -}}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "equipoise.selector" . | nindent 8 }}
{{- end -}}

{{/* "true" if the balancer calls the Kubernetes API. */}}
{{- define "equipoise.balancerUsesCluster" -}}
{{- or .Values.balancer.events (eq (include "equipoise.lease" .) "kubernetes") -}}
{{- end -}}

{{- define "equipoise.policyConfigMap" -}}
{{- .Values.policy.existingConfigMap | default (printf "%s-policy" (include "equipoise.fullname" .)) -}}
{{- end -}}
