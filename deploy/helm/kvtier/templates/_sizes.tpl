{{/* .value and .name, such as cache.hostCapacity: bytes, as text without an exponent. */}}
{{- define "kvtier.bytes" -}}
{{- $text := toString .value -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(KiB|MiB|GiB|TiB|KB|MB|GB|TB)$" $text) -}}
{{- fail (printf "%s = %q is no size: give a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 64GiB" .name $text) -}}
{{- end -}}
{{- $factors := dict "KiB" 1024.0 "MiB" 1048576.0 "GiB" 1073741824.0 "TiB" 1099511627776.0 "KB" 1e3 "MB" 1e6 "GB" 1e9 "TB" 1e12 -}}
{{- $bytes := mulf (regexFind "^[0-9.]+" $text | float64) (get $factors (regexFind "[A-Za-z]+$" $text)) -}}
{{- if le $bytes 0.0 -}}
{{- fail (printf "%s = %q must be larger than 0, such as 64GiB" .name $text) -}}
{{- end -}}
{{- printf "%.0f" $bytes -}}
{{- end -}}

{{/* .value and .name: MiB, rounded up. */}}
{{- define "kvtier.mib" -}}
{{- printf "%.0f" (divf (include "kvtier.bytes" . | float64) 1048576.0 | ceil) -}}
{{- end -}}

{{/* MiB of the cache server without its values: 512 for the process, its connections and what waits to be written; 1.5
KiB per value for the index (measured: docs/results/deploy.md). */}}
{{- define "kvtier.cacheOverheadMib" -}}
{{- $held := include "kvtier.bytes" (dict "value" .Values.cache.hostCapacity "name" "cache.hostCapacity") | float64 -}}
{{- with .Values.cache.nvme.capacity -}}
{{- $held = addf $held (include "kvtier.bytes" (dict "value" . "name" "cache.nvme.capacity") | float64) -}}
{{- end -}}
{{- $value := include "kvtier.bytes" (dict "value" .Values.cache.valueSize "name" "cache.valueSize") | float64 -}}
{{- printf "%.0f" (addf 512.0 (divf (mulf (divf $held $value) 1536.0) 1048576.0 | ceil)) -}}
{{- end -}}

{{/* MiB that the cache server needs: its values, 1 % for page tables, and the rest. */}}
{{- define "kvtier.cacheNeedsMib" -}}
{{- $host := include "kvtier.mib" (dict "value" .Values.cache.hostCapacity "name" "cache.hostCapacity") | float64 -}}
{{- printf "%.0f" (addf (mulf $host 1.01 | ceil) (include "kvtier.cacheOverheadMib" . | float64)) -}}
{{- end -}}

{{- define "kvtier.cacheMemoryMib" -}}
{{- $needs := include "kvtier.cacheNeedsMib" . -}}
{{- if .Values.cache.memory -}}
{{- include "kvtier.mib" (dict "value" .Values.cache.memory "name" "cache.memory") -}}
{{- else -}}
{{- $needs -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.cacheResources" -}}
{{- $memory := include "kvtier.cacheMemoryMib" . | int64 -}}
{{- $huge := "" -}}
{{- if .Values.cache.hugePages -}}
{{- $mib := include "kvtier.mib" (dict "value" .Values.cache.hostCapacity "name" "cache.hostCapacity") | int64 -}}
{{- $huge = printf "%dMi" (mul 2 (div (add $mib 1) 2)) -}}
{{- $memory = sub $memory $mib -}}
{{- end -}}
requests:
  cpu: {{ .Values.cache.cpu.request | quote }}
  memory: {{ $memory }}Mi
  {{- with $huge }}
  hugepages-2Mi: {{ . }}
  {{- end }}
limits:
  cpu: {{ .Values.cache.cpu.limit | quote }}
  memory: {{ $memory }}Mi
  {{- with $huge }}
  hugepages-2Mi: {{ . }}
  {{- end }}
{{- end -}}

{{/* MiB: the engine's own, its host tier with 1 % for page tables, what is in /dev/shm, the socket's directory. */}}
{{- define "kvtier.engineMemoryMib" -}}
{{- $own := include "kvtier.mib" (dict "value" .Values.engine.memory "name" "engine.memory") | float64 -}}
{{- $host := include "kvtier.mib" (dict "value" .Values.engine.hostCapacity "name" "engine.hostCapacity") | float64 -}}
{{- $shared := include "kvtier.mib" (dict "value" .Values.engine.sharedMemory "name" "engine.sharedMemory") | float64 -}}
{{- printf "%.0f" (addf $own (mulf $host 1.01 | ceil) $shared 256.0) -}}
{{- end -}}

{{/* Of a claim: the capacity, 6 % that file systems keep for themselves, 0.5 KiB per value and 1 GiB for what is beside the
pages: the index's log, what was deleted. */}}
{{- define "kvtier.claimMib" -}}
{{- $size := .Values.cache.nvme.volume.size -}}
{{- if $size -}}
{{- include "kvtier.mib" (dict "value" $size "name" "cache.nvme.volume.size") -}}
{{- else -}}
{{- include "kvtier.volumeMib" . -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.volumeMib" -}}
{{- $mib := include "kvtier.mib" (dict "value" .Values.cache.nvme.capacity "name" "cache.nvme.capacity") | float64 -}}
{{- $value := include "kvtier.mib" (dict "value" .Values.cache.valueSize "name" "cache.valueSize") | float64 -}}
{{- printf "%.0f" (addf (mulf $mib 1.06 | ceil) (divf $mib $value 2048.0 | ceil) 1024.0) -}}
{{- end -}}

{{/* Seconds from being told to stop until the cache server has to be gone: 15 for closing its tiers and its port. */}}
{{- define "kvtier.cacheGraceSeconds" -}}
{{- add (include "kvtier.cachePreStopSeconds" . | int) .Values.cache.drainSeconds 15 -}}
{{- end -}}

{{/* Other pods stop connecting when they have heard that it goes; in its own pod the engine is gone before. */}}
{{- define "kvtier.cachePreStopSeconds" -}}
{{- if eq .Values.shape "daemonset" }}5{{ else }}0{{ end -}}
{{- end -}}
