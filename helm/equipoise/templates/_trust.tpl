{{/* What a pod shows to others and asks of them: certificates, tokens, or that it speaks plain text.

All take (dict "root" $ "component" "…" "as" "…"): "as" is balancer, worker or gateway, whose
certificate and token the pod has. */}}

{{/* Flags of a port that asks for tokens. */}}
{{- define "equipoise.tokensFlag" -}}
{{- if .Values.tokens.existingSecret.name }}
- --tokens=/etc/equipoise/tokens/accepted
{{- end }}
{{- end -}}

{{/* Variables and not flags, so that commands of `kubectl exec` have them too. */}}
{{- define "equipoise.trustEnv" -}}
{{- if .root.Values.tls.enabled }}
- {name: EQUIPOISE_TLS_CA, value: /etc/equipoise/tls/ca.crt}
- {name: EQUIPOISE_TLS_CERT, value: /etc/equipoise/tls/tls.crt}
- {name: EQUIPOISE_TLS_KEY, value: /etc/equipoise/tls/tls.key}
- {name: EQUIPOISE_TLS_BALANCER_NAME, value: {{ include "equipoise.tlsBalancerName" .root | quote }}}
{{- if has .component (list "worker" "gateway") }}
- {name: EQUIPOISE_TLS_WORKER_NAME, value: {{ include "equipoise.tlsWorkerName" .root | quote }}}
{{- end }}
{{- else if .root.Values.insecure }}
- {name: EQUIPOISE_INSECURE, value: "true"}
{{- end }}
{{- if .root.Values.tokens.existingSecret.name }}
{{- if eq .as "balancer" }}
# The balancer itself calls nobody.
- {name: EQUIPOISE_TOKEN_FILE, value: /etc/equipoise/reader/reader}
{{- else }}
- {name: EQUIPOISE_TOKEN_FILE, value: /etc/equipoise/tokens/{{ .as }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "equipoise.trustMounts" -}}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/equipoise/tls, readOnly: true}
{{- end }}
{{- if .root.Values.tokens.existingSecret.name }}
- {name: tokens, mountPath: /etc/equipoise/tokens, readOnly: true}
{{- if eq .as "balancer" }}
- {name: reader, mountPath: /etc/equipoise/reader, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{/* The whole folders: a file that is mounted by subPath would never be renewed. */}}
{{- define "equipoise.trustVolumes" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "equipoise.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.tokens.existingSecret.name }}
- name: tokens
  secret:
    secretName: {{ .root.Values.tokens.existingSecret.name }}
    defaultMode: 0440
    items:
      {{- if and (ne .as "gateway") (ne .component "test") }}
      - {key: accepted, path: accepted}
      {{- end }}
      {{- if ne .as "balancer" }}
      - {key: {{ .as }}, path: {{ .as }}}
      {{- end }}
{{- if eq .as "balancer" }}
# Apart, because only this key may be missing.
- name: reader
  secret:
    secretName: {{ .root.Values.tokens.existingSecret.name }}
    defaultMode: 0440
    optional: true
    items: [{key: reader, path: reader}]
{{- end }}
{{- end }}
{{- end -}}

{{/* Whoever has no certificate, such as a kubelet's probe, is answered over plain HTTP.
Takes (dict "root" $ "port" … "service" "…" "path" "…"). */}}
{{- define "equipoise.probe" -}}
{{- if .root.Values.tls.enabled -}}
httpGet: {port: metrics, path: {{ .path }}}
{{- else -}}
grpc: {port: {{ .port }}, service: {{ .service }}}
{{- end -}}
{{- end -}}

{{/* The Secret with the certificate of .as. */}}
{{- define "equipoise.tlsSecret" -}}
{{- index .root.Values.tls.secrets .as | default (printf "%s-%s-tls" (include "equipoise.fullname" .root) .as) -}}
{{- end -}}

{{/* Pods are dialled by their addresses, which no certificate has: these names are verified. */}}
{{- define "equipoise.tlsBalancerName" -}}
{{- .Values.tls.balancerName | default (include "equipoise.balancerAddress" . | splitList ":" | first) -}}
{{- end -}}

{{- define "equipoise.tlsWorkerName" -}}
{{- .Values.tls.workerName | default (printf "%s-worker.%s.svc" (include "equipoise.fullname" .) .Release.Namespace) -}}
{{- end -}}
