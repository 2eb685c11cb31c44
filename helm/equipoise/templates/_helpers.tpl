{{/* Names, labels and addresses used by several objects. */}}

{{- define "equipoise.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "equipoise.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "equipoise.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "equipoise.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Selector labels of Services and workloads; immutable. Takes (dict "root" $ "component" "…"). */}}
{{- define "equipoise.selector" -}}
app.kubernetes.io/name: {{ include "equipoise.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "equipoise.labels" -}}
{{ include "equipoise.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: equipoise
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes (dict "root" $ "image" .Values.image.…). */}}
{{- define "equipoise.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Name of a component's service account. Takes (dict "root" $ "component" "…" "account" .Values.….serviceAccount). */}}
{{- define "equipoise.serviceAccountName" -}}
{{- .account.name | default (ternary (printf "%s-%s" (include "equipoise.fullname" .root) .component) "default" .account.create) -}}
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
{{- if or .Values.redis.trial.enabled .Values.redis.url .Values.redis.existingSecret.name -}}true{{- end -}}
{{- end -}}

{{/* Leader election: store or kubernetes. */}}
{{- define "equipoise.lease" -}}
{{- if ne .Values.balancer.lease "auto" -}}
{{ .Values.balancer.lease }}
{{- else -}}
{{ ternary "kubernetes" "store" (and (eq (include "equipoise.shared" .) "true") (gt (int .Values.balancer.replicas) 1)) }}
{{- end -}}
{{- end -}}

{{/* The number of ranks that may be missing while the others hold every expert. */}}
{{- define "equipoise.spareRanks" -}}
{{- $w := .Values.worker -}}
{{- $needed := div (add $w.numExperts $w.slotsPerRank -1) $w.slotsPerRank -}}
{{- sub $w.replicas $needed -}}
{{- end -}}

{{/* Update strategy: RollingUpdate or OnDelete. */}}
{{- define "equipoise.workerUpdateStrategy" -}}
{{- if ne .Values.worker.updateStrategy "auto" -}}
{{ .Values.worker.updateStrategy }}
{{- else -}}
{{ ternary "RollingUpdate" "OnDelete" (gt (include "equipoise.spareRanks" . | int) 0) }}
{{- end -}}
{{- end -}}

{{/* Security context of all pods: not root, read-only image. */}}
{{- define "equipoise.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
fsGroup: {{ .Values.runAsUser }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "equipoise.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Scheduling of pods. Takes (dict "root" $ "component" "…" "pod" .Values.…). */}}
{{- define "equipoise.scheduling" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
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

{{/* OpenTelemetry's variables for the collector. */}}
{{- define "equipoise.tracingEnv" -}}
{{- with .root.Values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "equipoise.policyConfigMap" -}}
{{- .Values.policy.existingConfigMap | default (printf "%s-policy" (include "equipoise.fullname" .)) -}}
{{- end -}}
