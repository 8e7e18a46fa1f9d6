{{/* engine.yaml: what the user wrote, and the tiers and the port, which the shape decides. */}}
{{- define "kvtier.engineConfig" -}}
{{- $engine := .Values.engine -}}
{{- with $engine.config }}
{{ toYaml . }}
{{- end }}
tiers:
  - type: host
    capacity: {{ $engine.hostCapacity }}
  - type: redis
    {{- if eq .Values.shape "redis" }}
    url: {{ include "kvtier.redisUrl" . | quote }}
    mode: {{ .Values.redis.mode }}
    {{- with .Values.redis.service }}
    service: {{ . }}
    {{- end }}
    {{- if .Values.redis.auth }}
    password_file: /run/secrets/kvtier/redis-password
    {{- end }}
    {{- with .Values.redis.ttl }}
    ttl: {{ . }}
    {{- end }}
    {{- if .Values.redis.tlsCaSecretName }}
    tls_ca: /run/secrets/kvtier-redis-ca/ca.crt
    {{- end }}
    {{- else }}
    url: unix:///run/kvtier/cache.sock
    {{- if include "kvtier.cachePassword" . }}
    password_file: /run/secrets/kvtier/password
    {{- end }}
    {{- end }}
http:
  host: {{ include "kvtier.anyAddress" . | quote }}
  port: {{ $engine.httpPort }}
  allow_remote: true
  token_file: /run/secrets/kvtier/http-token
{{- end -}}

{{- define "kvtier.redisUrl" -}}
{{- if .Values.redis.url -}}
{{- .Values.redis.url -}}
{{- else -}}
redis://{{ include "kvtier.valkeyName" . }}:6379/0
{{- end -}}
{{- end -}}

{{/* The name of the Service of charts/valkey, which makes it in the same way. */}}
{{- define "kvtier.valkeyName" -}}
{{- printf "%s-valkey" (.Release.Name | trunc 54 | trimSuffix "-") -}}
{{- end -}}

{{- define "kvtier.engineContainer" -}}
{{- $engine := .Values.engine -}}
name: engine
image: {{ include "kvtier.image" (dict "root" . "image" $engine.image) }}
imagePullPolicy: {{ $engine.image.pullPolicy }}
command: {{- toYaml $engine.command | nindent 2 }}
{{- with $engine.args }}
args: {{- toYaml . | nindent 2 }}
{{- end }}
env:
  # A user without an entry in /etc/passwd: libraries ask for its name and its home directory.
  - {name: HOME, value: /home/engine}
  - {name: USER, value: kvtier}
  {{- with $engine.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: http, containerPort: {{ $engine.port }}}
  {{- range $rank := until (int $engine.ranks) }}
  - {name: metrics-{{ $rank }}, containerPort: {{ add $engine.httpPort $rank }}}
  {{- end }}
startupProbe:
  httpGet: {path: {{ $engine.healthPath }}, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ divf $engine.startupSeconds 10 | ceil | int }}
livenessProbe:
  httpGet: {path: {{ $engine.healthPath }}, port: http}
  periodSeconds: 15
  timeoutSeconds: 10
  failureThreshold: 8
readinessProbe:
  httpGet: {path: {{ $engine.healthPath }}, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
lifecycle:
  preStop: {sleep: {seconds: {{ $engine.preStopSeconds }}}}
resources:
  requests:
    cpu: {{ $engine.cpu.request | quote }}
    memory: {{ include "kvtier.engineMemoryMib" . }}Mi
    {{- if $engine.gpu.count }}
    {{ $engine.gpu.resource }}: {{ $engine.gpu.count }}
    {{- end }}
  limits:
    cpu: {{ $engine.cpu.limit | quote }}
    memory: {{ include "kvtier.engineMemoryMib" . }}Mi
    {{- if $engine.gpu.count }}
    {{ $engine.gpu.resource }}: {{ $engine.gpu.count }}
    {{- end }}
# Engines write where they are installed: compiled kernels, caches of their libraries.
securityContext: {{- include "kvtier.containerSecurity" (dict "readOnly" false) | nindent 2 }}
volumeMounts:
  - {name: engine-config, mountPath: /etc/kvtier, readOnly: true}
  - {name: engine-secret, mountPath: /run/secrets/kvtier, readOnly: true}
  {{- if include "kvtier.hasCache" . }}
  - {name: socket, mountPath: /run/kvtier, readOnly: true}
  {{- end }}
  {{- if and (eq .Values.shape "redis") .Values.redis.tlsCaSecretName }}
  - {name: redis-ca, mountPath: /run/secrets/kvtier-redis-ca, readOnly: true}
  {{- end }}
  - {name: home, mountPath: /home/engine}
  - {name: shm, mountPath: /dev/shm}
  {{- with $engine.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "kvtier.engineVolumes" -}}
{{- $engine := .Values.engine -}}
- name: engine-config
  configMap: {name: {{ include "kvtier.fullname" . }}-engine}
- name: engine-secret
  secret:
    secretName: {{ .Values.secret.name | quote }}
    defaultMode: 0440
    items:
      - {key: {{ .Values.secret.httpToken | quote }}, path: http-token}
      {{- if include "kvtier.cachePassword" . }}
      - {key: {{ .Values.secret.password | quote }}, path: password}
      {{- end }}
      {{- if and (eq .Values.shape "redis") .Values.redis.auth }}
      - {key: {{ .Values.secret.redisPassword | quote }}, path: redis-password}
      {{- end }}
{{- if eq .Values.shape "daemonset" }}
- name: socket
  hostPath: {path: {{ include "kvtier.socketOnNode" . | quote }}, type: DirectoryOrCreate}
{{- end }}
{{- if and (eq .Values.shape "redis") .Values.redis.tlsCaSecretName }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.tlsCaSecretName }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
- name: home
  emptyDir: {sizeLimit: {{ include "kvtier.mib" (dict "value" $engine.cacheSize "name" "engine.cacheSize") }}Mi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ include "kvtier.mib" (dict "value" $engine.sharedMemory "name" "engine.sharedMemory") }}Mi}
{{- with $engine.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
