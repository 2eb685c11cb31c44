{{/* A pod's credentials and those it requires: certificates, tokens, or plain text.

All take (dict "root" $ "component" "…" "as" "…"): "as" is balancer, worker or gateway, whose
certificate and signing key the pod has. */}}

{{/* Flags of a port that requires tokens. */}}
{{- define "equipoise.tokensFlag" -}}
{{- if .Values.tokens.existingSecret.name }}
- --accepted-keys=/etc/equipoise/tokens/accepted
{{- end }}
{{- end -}}

{{/* Variables instead of flags, so that commands run with `kubectl exec` have them too. */}}
{{- define "equipoise.trustEnv" -}}
{{- if .root.Values.tls.enabled }}
- {name: EQUIPOISE_TLS_CA, value: /etc/equipoise/tls/ca.crt}
- {name: EQUIPOISE_TLS_CERT, value: /etc/equipoise/tls/tls.crt}
- {name: EQUIPOISE_TLS_KEY, value: /etc/equipoise/tls/tls.key}
- {name: EQUIPOISE_TLS_TRUST_DOMAIN, value: {{ .root.Values.tls.trustDomain | quote }}}
- {name: EQUIPOISE_TLS_BALANCER_NAME, value: {{ include "equipoise.tlsBalancerName" .root | quote }}}
{{- if has .component (list "worker" "gateway") }}
- {name: EQUIPOISE_TLS_WORKER_NAME, value: {{ include "equipoise.tlsWorkerName" .root | quote }}}
{{- end }}
{{- else if .root.Values.insecure }}
- {name: EQUIPOISE_INSECURE, value: "true"}
{{- end }}
{{- if .root.Values.tokens.existingSecret.name }}
{{- if eq .as "balancer" }}
# The balancer itself makes no calls.
- {name: EQUIPOISE_SIGNING_KEY, value: /etc/equipoise/reader/reader}
{{- else if eq (include "equipoise.ownWorkerKey" .) "true" }}
- {name: EQUIPOISE_SIGNING_KEY, value: /etc/equipoise/own-key}
{{- else }}
- {name: EQUIPOISE_SIGNING_KEY, value: /etc/equipoise/tokens/{{ .as }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* "true" if the pod serves metrics to scrapers with a token only. */}}
{{- define "equipoise.hasScrapeToken" -}}
{{- $metrics := .root.Values.metrics -}}
{{- if and $metrics.enabled $metrics.tokenSecret.name (ne .component "test") -}}true{{- end -}}
{{- end -}}

{{- define "equipoise.trustMounts" -}}
{{- if include "equipoise.hasScrapeToken" . }}
- {name: metrics-token, mountPath: /etc/equipoise/metrics, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/equipoise/tls, readOnly: true}
{{- end }}
{{- if .root.Values.tokens.existingSecret.name }}
- {name: tokens, mountPath: /etc/equipoise/tokens, readOnly: true}
{{- if eq .as "balancer" }}
- {name: reader, mountPath: /etc/equipoise/reader, readOnly: true}
{{- end }}
{{- if eq (include "equipoise.ownWorkerKey" .) "true" }}
# With subPath a container sees its own key only; a replaced key needs a new pod.
- {name: worker-keys, mountPath: /etc/equipoise/own-key, subPathExpr: $(POD_NAME), readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{/* Mount folders, because a file mounted with subPath is never updated. */}}
{{- define "equipoise.trustVolumes" -}}
{{- if include "equipoise.hasScrapeToken" . }}
- name: metrics-token
  secret:
    secretName: {{ .root.Values.metrics.tokenSecret.name | quote }}
    defaultMode: 0440
    items: [{key: {{ .root.Values.metrics.tokenSecret.key | quote }}, path: token}]
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  {{- if eq (include "equipoise.ownWorkerCertificate" .) "true" }}
  {{- include "equipoise.csiCertificate" .root | nindent 2 }}
  {{- else }}
  secret: {secretName: {{ include "equipoise.tlsSecret" . | quote }}, defaultMode: 0440}
  {{- end }}
{{- end }}
{{- if .root.Values.tokens.existingSecret.name }}
- name: tokens
  secret:
    secretName: {{ .root.Values.tokens.existingSecret.name | quote }}
    defaultMode: 0440
    items:
      {{- if and (ne .as "gateway") (ne .component "test") }}
      - {key: accepted, path: accepted}
      {{- end }}
      {{- if and (ne .as "balancer") (ne (include "equipoise.ownWorkerKey" .) "true") }}
      - {key: {{ .as }}, path: {{ .as }}}
      {{- end }}
{{- if eq (include "equipoise.ownWorkerKey" .) "true" }}
- name: worker-keys
  secret: {secretName: {{ .root.Values.tokens.perWorkerSecret.name | quote }}, defaultMode: 0440}
{{- end }}
{{- if eq .as "balancer" }}
# Separate, because only this key is optional.
- name: reader
  secret:
    secretName: {{ .root.Values.tokens.existingSecret.name | quote }}
    defaultMode: 0440
    optional: true
    items: [{key: reader, path: reader}]
{{- end }}
{{- end }}
{{- end -}}

{{/* "true" if cert-manager's CSI driver gives the pod a certificate of its own. */}}
{{- define "equipoise.ownWorkerCertificate" -}}
{{- if and (eq .as "worker") .root.Values.tls.certManager.csiDriver (not .root.Values.worker.engine) -}}true{{- end -}}
{{- end -}}

{{/* A certificate that names the pod. Its key never leaves the machine. Takes the root. */}}
{{- define "equipoise.csiCertificate" -}}
{{- $issuer := .Values.tls.certManager -}}
csi:
  driver: csi.cert-manager.io
  readOnly: true
  volumeAttributes:
    csi.cert-manager.io/issuer-name: {{ $issuer.issuerRef.name | quote }}
    csi.cert-manager.io/issuer-kind: {{ $issuer.issuerRef.kind | quote }}
    csi.cert-manager.io/issuer-group: {{ $issuer.issuerRef.group | quote }}
    csi.cert-manager.io/dns-names: {{ include "equipoise.tlsWorkerName" . | quote }}
    csi.cert-manager.io/uri-sans: {{ printf "spiffe://%s/equipoise/worker/%s/${POD_NAME}" .Values.tls.trustDomain (include "equipoise.quotedPool" .) | quote }}
    csi.cert-manager.io/key-usages: digital signature,server auth,client auth
    csi.cert-manager.io/duration: {{ $issuer.duration }}
    csi.cert-manager.io/renew-before: {{ $issuer.renewBefore }}
    csi.cert-manager.io/fs-group: {{ .Values.runAsUser | quote }}
{{- end -}}

{{- define "equipoise.quotedPool" -}}
{{- .Values.pool | urlquery | replace "+" "%20" -}}
{{- end -}}

{{/* "true" if the pod has a signing key of its own, in a Secret with a key for each worker. */}}
{{- define "equipoise.ownWorkerKey" -}}
{{- if and (eq .as "worker") .root.Values.tokens.perWorkerSecret.name (not .root.Values.worker.engine) -}}true{{- end -}}
{{- end -}}

{{/* Probes have no certificate, so with TLS they use plain HTTP; those of several ranks do, too.
Takes (dict "root" $ "port" … "service" "…" "path" "…" "several" …). */}}
{{- define "equipoise.probe" -}}
{{- if or .root.Values.tls.enabled .several -}}
httpGet: {port: probes, path: {{ .path }}}
{{- else -}}
grpc: {port: {{ .port }}, service: {{ .service }}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with the certificate of .as. */}}
{{- define "equipoise.tlsSecret" -}}
{{- index .root.Values.tls.secrets .as | default (printf "%s-%s-tls" (include "equipoise.fullname" .root) .as) -}}
{{- end -}}

{{/* Name of a Secret with the authority of .as. A certificate of the CSI driver is in none, but all have one authority. */}}
{{- define "equipoise.authoritySecret" -}}
{{- $as := .as -}}
{{- if eq (include "equipoise.ownWorkerCertificate" .) "true" -}}
{{- $as = ternary "balancer" "gateway" .root.Values.balancer.enabled -}}
{{- end -}}
{{- include "equipoise.tlsSecret" (dict "root" .root "as" $as) -}}
{{- end -}}

{{/* Name in the certificate of .as. */}}
{{- define "equipoise.tlsName" -}}
{{- if eq .as "balancer" -}}{{ include "equipoise.tlsBalancerName" .root }}
{{- else if eq .as "worker" -}}{{ include "equipoise.tlsWorkerName" .root }}
{{- else -}}{{ include "equipoise.fullname" .root }}-{{ .as }}.{{ .root.Release.Namespace }}.svc
{{- end -}}
{{- end -}}

{{/* Names to expect in certificates, because pods are dialled by addresses. */}}
{{- define "equipoise.tlsBalancerName" -}}
{{- .Values.tls.balancerName | default (include "equipoise.balancerAddress" . | splitList ":" | first) -}}
{{- end -}}

{{- define "equipoise.tlsWorkerName" -}}
{{- .Values.tls.workerName | default (printf "%s-worker.%s.svc" (include "equipoise.fullname" .) .Release.Namespace) -}}
{{- end -}}
