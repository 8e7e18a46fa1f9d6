{{/* A name of at most 40 characters, so that what is appended stays within the 63 of a label and the 52 of a StatefulSet.
Longer ones are cut and keep a hash, so that two of them do not become one. */}}
{{- define "kvtier.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 40 -}}
{{- $name = printf "%s-%s" (trunc 33 $name | trimSuffix "-") (sha256sum $name | trunc 6) -}}
{{- end -}}
{{- trimSuffix "-" $name -}}
{{- end -}}

{{- define "kvtier.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvtier.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What never changes in a release: selectors are made of it. */}}
{{- define "kvtier.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Of pods: no version, so that a new chart with the same pods leaves them alone. part-of is also the job that Prometheus
sees, which the alerting rules ask for. */}}
{{- define "kvtier.podLabels" -}}
{{ include "kvtier.selector" . }}
app.kubernetes.io/part-of: kvtier
{{- end -}}

{{- define "kvtier.labels" -}}
{{ include "kvtier.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end -}}

{{/* .root, .image */}}
{{- define "kvtier.image" -}}
{{- $image := .image -}}
{{- with .root.Values.global.imageRegistry }}{{ . | trimSuffix "/" }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default .root.Chart.AppVersion $image.tag }}{{ end -}}
{{- end -}}

{{- define "kvtier.anyAddress" -}}{{ ternary "::" "0.0.0.0" .Values.ipv6 }}{{- end -}}

{{/* Whether there is a cache server. */}}
{{- define "kvtier.hasCache" -}}{{ if ne .Values.shape "redis" }}true{{ end }}{{- end -}}

{{- define "kvtier.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* .readOnly: whether the root file system is. */}}
{{- define "kvtier.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: {{ .readOnly }}
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* .root, .where: daemonset or engine */}}
{{- define "kvtier.placement" -}}
{{- with .where.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .where.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .where.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .where.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
