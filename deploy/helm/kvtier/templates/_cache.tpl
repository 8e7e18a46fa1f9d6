{{/* The cache server's container, the same in both shapes. .root and .readiness: the path that says ready. */}}
{{- define "kvtier.cacheContainer" -}}
{{- $root := .root -}}
{{- $cache := $root.Values.cache -}}
name: cache
image: {{ include "kvtier.image" (dict "root" $root "image" $cache.image) }}
imagePullPolicy: {{ $cache.image.pullPolicy }}
command: [kvtier]
args: [serve, --config, /etc/kvtier/server.yaml]
{{- with $cache.env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: cache-metrics, containerPort: {{ $cache.http.port }}}
  {{- if $cache.tcp.enabled }}
  - {name: cache, containerPort: {{ $cache.tcp.port }}}
  {{- end }}
# /livez answers from the first second, also while memory is touched and directories are opened, however long that takes.
# So it alone decides about restarts; being slow is being not ready.
startupProbe:
  httpGet: {path: /livez, port: cache-metrics}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: cache-metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: {{ .readiness }}, port: cache-metrics}
  periodSeconds: 10
  timeoutSeconds: 6
  failureThreshold: 3
{{- with include "kvtier.cachePreStopSeconds" $root | int }}
lifecycle:
  preStop: {sleep: {seconds: {{ . }}}}
{{- end }}
resources: {{- include "kvtier.cacheResources" $root | nindent 2 }}
securityContext: {{- include "kvtier.containerSecurity" (dict "readOnly" true) | nindent 2 }}
volumeMounts:
  - {name: cache-config, mountPath: /etc/kvtier, readOnly: true}
  - {name: cache-secret, mountPath: /run/secrets/kvtier, readOnly: true}
  - {name: socket, mountPath: /run/kvtier}
  - {name: cache-tmp, mountPath: /tmp}
  {{- if $cache.tcp.tlsSecretName }}
  - {name: cache-tls, mountPath: /run/secrets/kvtier-tls, readOnly: true}
  {{- end }}
  {{- range $i := until (include "kvtier.nvmeVolumes" $root | int) }}
  - {name: nvme{{ $i }}, mountPath: /var/lib/kvtier/nvme{{ $i }}}
  {{- end }}
{{- end -}}

{{/* Whether clients need a password: where others can connect, and where there are users, of which one is then the engine. */}}
{{- define "kvtier.cachePassword" -}}
{{- if and (include "kvtier.hasCache" .) (or .Values.cache.tcp.enabled .Values.cache.users) }}true{{ end -}}
{{- end -}}

{{/* How many volumes the NVMe tier has. */}}
{{- define "kvtier.nvmeVolumes" -}}
{{- $nvme := .Values.cache.nvme -}}
{{- if not $nvme.capacity }}0{{ else if eq $nvme.volume.type "hostPath" }}{{ len $nvme.volume.hostPaths }}{{ else }}1{{ end -}}
{{- end -}}

{{/* Of the shape daemonset, on the node: two releases never share one. */}}
{{- define "kvtier.nodeDirectory" -}}
{{- printf "%s-%s" .Release.Namespace (include "kvtier.fullname" .) -}}
{{- end -}}

{{- define "kvtier.socketOnNode" -}}
{{- printf "%s/%s" (trimSuffix "/" .Values.daemonset.socketDirectory) (include "kvtier.nodeDirectory" .) -}}
{{- end -}}

{{/* Volumes of the cache server, but for the claim of a StatefulSet. */}}
{{- define "kvtier.cacheVolumes" -}}
{{- $root := . -}}
{{- $cache := .Values.cache -}}
{{- $volume := $cache.nvme.volume -}}
- name: cache-config
  configMap: {name: {{ include "kvtier.fullname" . }}-cache}
- name: cache-secret
  secret:
    secretName: {{ .Values.secret.name | quote }}
    defaultMode: 0440
    items:
      - {key: {{ .Values.secret.httpToken | quote }}, path: http-token}
      {{- if include "kvtier.cachePassword" . }}
      - {key: {{ .Values.secret.password | quote }}, path: password}
      {{- end }}
      {{- range $cache.users }}
      - {key: {{ .passwordKey | quote }}, path: user-{{ .name }}}
      {{- end }}
{{- with $cache.tcp.tlsSecretName }}
- name: cache-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
- name: socket
  {{- if eq .Values.shape "daemonset" }}
  hostPath: {path: {{ include "kvtier.socketOnNode" . | quote }}, type: DirectoryOrCreate}
  {{- else }}
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
  {{- end }}
- name: cache-tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if $cache.nvme.capacity }}
{{- if eq $volume.type "hostPath" }}
{{- range $i, $path := $volume.hostPaths }}
- name: nvme{{ $i }}
  hostPath: {path: {{ printf "%s/%s" (trimSuffix "/" $path) (include "kvtier.nodeDirectory" $root) | quote }}, type: DirectoryOrCreate}
{{- end }}
{{- else if eq $volume.type "emptyDir" }}
- name: nvme0
  emptyDir: {sizeLimit: {{ include "kvtier.claimMib" . }}Mi}
{{- else if eq .Values.shape "daemonset" }}
- name: nvme0
  ephemeral:
    volumeClaimTemplate:
      spec: {{- include "kvtier.claim" . | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvtier.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.cache.nvme.volume.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ include "kvtier.claimMib" . }}Mi}}
{{- end -}}

{{/* server.yaml */}}
{{- define "kvtier.serverConfig" -}}
{{- $root := . -}}
{{- $cache := .Values.cache -}}
tiers:
  - type: host
    capacity: {{ $cache.hostCapacity }}
    policy: {{ $cache.hostPolicy }}
    {{- if $cache.hugePages }}
    huge_pages: reserved
    {{- end }}
  {{- if $cache.nvme.capacity }}
  - type: nvme
    path: [{{ range $i := until (include "kvtier.nvmeVolumes" . | int) }}{{ if $i }}, {{ end }}/var/lib/kvtier/nvme{{ $i }}{{ end }}]
    capacity: {{ $cache.nvme.capacity }}
    policy: {{ $cache.nvme.policy }}
    write: {{ $cache.nvme.write }}
  {{- end }}
http:
  host: {{ include "kvtier.anyAddress" . | quote }}
  port: {{ $cache.http.port }}
  allow_remote: true
  token_file: /run/secrets/kvtier/http-token
server:
  listen:
    - unix:/run/kvtier/cache.sock
    {{- if $cache.tcp.enabled }}
    - {{ ternary "tls" "tcp" (ne $cache.tcp.tlsSecretName "") }}:{{ ternary "[::]" "0.0.0.0" .Values.ipv6 }}:{{ $cache.tcp.port }}
    {{- end }}
  {{- if include "kvtier.cachePassword" . }}
  password_file: /run/secrets/kvtier/password
  {{- end }}
  {{- if $cache.tcp.tlsSecretName }}
  tls_cert: /run/secrets/kvtier-tls/tls.crt
  tls_key: /run/secrets/kvtier-tls/tls.key
  {{- end }}
  {{- with $cache.users }}
  users:
    {{- range . }}
    - name: {{ .name | quote }}
      password_file: /run/secrets/kvtier/user-{{ .name }}
      {{- with .prefixes }}
      prefixes: {{ toJson . }}
      {{- end }}
      {{- if .readOnly }}
      read_only: true
      {{- end }}
      {{- with .quota }}
      quota: {{ . }}
      {{- end }}
      {{- with .priority }}
      priority: {{ . }}
      {{- end }}
    {{- end }}
  {{- end }}
  max_connections: {{ $cache.maxConnections }}
  max_value: {{ $cache.maxValue }}
  drain: {{ $cache.drainSeconds }}s
{{- end -}}
