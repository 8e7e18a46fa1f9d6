{{/* What a schema cannot say: values that do not fit together. Each message names them and the way out. */}}
{{- define "kvtier.check" -}}
{{- $v := .Values -}}
{{- if include "kvtier.hasCache" . -}}
{{- include "kvtier.checkCache" . -}}
{{- end -}}
{{- range $where, $image := dict "cache.image" $v.cache.image "engine.image" $v.engine.image -}}
{{- if eq $image.tag "latest" -}}
{{- fail (printf "%s.tag = \"latest\" names another image tomorrow: give a version, or a digest" $where) -}}
{{- end -}}
{{- end -}}
{{- range $where, $env := dict "cache.env" $v.cache.env "engine.env" $v.engine.env -}}
{{- range $env -}}
{{- if and (regexMatch "(?i)(passw(or)?ds?|passphrase|secrets?|token|api_?keys?|credentials?)([^a-z]|$)" .name) (hasKey . "value") -}}
{{- fail (printf "%s: %s holds a secret as text, which everybody sees who may list pods: use valueFrom with a secretKeyRef" $where .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range concat $v.engine.command $v.engine.args -}}
{{- if regexMatch "(?i)(^|[[:space:]])--?([a-z0-9]+[-_])*(api[-_]?key|password|token|secret)([=[:space:]]|$)" . -}}
{{- fail (printf "engine.args holds %q: arguments are seen by everybody on the node; use engine.env with a secretKeyRef, or a file" (regexFind "--?[A-Za-z0-9_-]+" .)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.engine.enabled $v.networkPolicy.enabled (ne $v.engine.service.type "ClusterIP") (not $v.networkPolicy.engineFrom) -}}
{{- fail (printf "engine.service.type = %q with an empty networkPolicy.engineFrom: only pods of this namespace would be let through; name who may connect, such as {ipBlock: {cidr: 10.0.0.0/8}}" $v.engine.service.type) -}}
{{- end -}}
{{- if and (not $v.engine.enabled) (ne $v.shape "daemonset") -}}
{{- fail (printf "engine.enabled = false with shape = %q leaves nothing to deploy: set shape to daemonset, or engine.enabled to true" $v.shape) -}}
{{- end -}}
{{- if eq $v.shape "redis" -}}
{{- if and (not $v.redis.url) (not $v.valkey.enabled) -}}
{{- fail "shape = \"redis\" needs redis.url: give the address of a Redis or Valkey, such as rediss://cache-1:6379,cache-2:6379, or set valkey.enabled for a trial" -}}
{{- end -}}
{{- if and $v.redis.url $v.valkey.enabled -}}
{{- fail (printf "redis.url = %q and valkey.enabled = true exclude each other: leave one out" $v.redis.url) -}}
{{- end -}}
{{- if regexMatch "://[^@/]*:[^@]*@" $v.redis.url -}}
{{- fail (printf "redis.url holds a password: put it into the Secret %s under the key %s and leave it out of the URL" $v.secret.name $v.secret.redisPassword) -}}
{{- end -}}
{{- if and $v.redis.tlsCaSecretName (not (hasPrefix "rediss://" $v.redis.url)) -}}
{{- fail (printf "redis.tlsCaSecretName = %q with redis.url = %q, which is not TLS: write rediss://, or leave the name out" $v.redis.tlsCaSecretName $v.redis.url) -}}
{{- end -}}
{{- if and (eq $v.redis.mode "sentinel") (not $v.redis.service) -}}
{{- fail "redis.mode = \"sentinel\" needs redis.service: the name under which the sentinels watch the master" -}}
{{- end -}}
{{- else if $v.valkey.enabled -}}
{{- fail (printf "valkey.enabled = true with shape = %q: no engine would use it; set shape to redis, or valkey.enabled to false" $v.shape) -}}
{{- end -}}
{{- $config := default dict $v.engine.config -}}
{{- range $name := list "tiers" "http" "server" -}}
{{- if hasKey $config $name -}}
{{- fail (printf "engine.config.%s is written by this chart: leave it out; see engine.hostCapacity, engine.httpPort and shape" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (lt (int $v.cache.http.port) (int (add $v.engine.httpPort $v.engine.ranks))) (ge (int $v.cache.http.port) (int $v.engine.httpPort)) (eq $v.shape "sidecar") -}}
{{- fail (printf "cache.http.port = %v is one of the ports from engine.httpPort = %v on, one for each rank, in the same pod: choose another" $v.cache.http.port $v.engine.httpPort) -}}
{{- end -}}
{{- range $where, $labels := dict "cache.podLabels" $v.cache.podLabels "engine.podLabels" $v.engine.podLabels -}}
{{- range $key := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/part-of" "app.kubernetes.io/component" -}}
{{- if hasKey (default dict $labels) $key -}}
{{- fail (printf "%s: %s is the chart's own, which selectors go by: leave it out" $where $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ports := list -}}
{{- if $v.engine.enabled -}}
{{- $ports = append $ports (int $v.engine.port) -}}
{{- range $rank := until (int $v.engine.ranks) -}}
{{- $ports = append $ports (int (add $v.engine.httpPort $rank)) -}}
{{- end -}}
{{- end -}}
{{- $cachePorts := list (int $v.cache.http.port) -}}
{{- if $v.cache.tcp.enabled -}}
{{- $cachePorts = append $cachePorts (int $v.cache.tcp.port) -}}
{{- end -}}
{{- $pods := dict "engine" $ports -}}
{{- if eq $v.shape "sidecar" -}}
{{- $pods = dict "engine" (concat $ports $cachePorts) -}}
{{- else if eq $v.shape "daemonset" -}}
{{- $pods = dict "engine" $ports "cache" $cachePorts -}}
{{- end -}}
{{- range $pod, $taken := $pods -}}
{{- if ne (len (uniq $taken)) (len $taken) -}}
{{- fail (printf "two of the ports of a pod (%s) are the same: engine.port, engine.httpPort and one more for each further rank, cache.http.port, cache.tcp.port; choose others" (join ", " $taken)) -}}
{{- end -}}
{{- end -}}
{{- range $where, $cpu := dict "cache.cpu" $v.cache.cpu "engine.cpu" $v.engine.cpu -}}
{{- if gt (include "kvtier.millicores" $cpu.request | float64) (include "kvtier.millicores" $cpu.limit | float64) -}}
{{- fail (printf "%s: request = %q is more than limit = %q, which Kubernetes refuses: raise the limit" $where (toString $cpu.request) (toString $cpu.limit)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.valkey.enabled (not (regexMatch "^[a-z]" .Release.Name)) -}}
{{- fail (printf "valkey.enabled with a release named %q: its Service would begin with no letter; choose another name of the release" .Release.Name) -}}
{{- end -}}
{{- $name := include "kvtier.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%q cannot be the name of a Service, which begins with a letter and has small letters, digits and - only: set fullnameOverride, or choose another name of the release" $name) -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.millicores" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text }}{{ trimSuffix "m" $text }}{{ else }}{{ mulf (float64 $text) 1000.0 }}{{ end -}}
{{- end -}}

{{- define "kvtier.checkCache" -}}
{{- $cache := .Values.cache -}}
{{- $nvme := $cache.nvme -}}
{{- $type := $nvme.volume.type -}}
{{- if and $nvme.capacity (not $type) -}}
{{- fail (printf "cache.nvme.capacity = %q has no volume to lie on: set cache.nvme.volume.type to claim, emptyDir or (daemonset) hostPath" $nvme.capacity) -}}
{{- end -}}
{{- if and $type (not $nvme.capacity) -}}
{{- fail (printf "cache.nvme.volume.type = %q without cache.nvme.capacity: say how much may be stored there, such as 200GiB" $type) -}}
{{- end -}}
{{- if eq $type "hostPath" -}}
{{- if ne .Values.shape "daemonset" -}}
{{- fail (printf "cache.nvme.volume.type = \"hostPath\" with shape = %q: two engines of a node would share it; use claim with a class of local volumes, or emptyDir" .Values.shape) -}}
{{- end -}}
{{- if not $nvme.volume.hostPaths -}}
{{- fail "cache.nvme.volume.type = \"hostPath\" needs cache.nvme.volume.hostPaths: name one directory per device, such as /mnt/nvme0/kvtier" -}}
{{- end -}}
{{- else if $nvme.volume.hostPaths -}}
{{- fail (printf "cache.nvme.volume.hostPaths with cache.nvme.volume.type = %q: set it to hostPath, or leave the paths out" $type) -}}
{{- end -}}
{{- if and $nvme.capacity $nvme.volume.size -}}
{{- $needs := include "kvtier.volumeMib" . | float64 -}}
{{- $size := include "kvtier.mib" (dict "value" $nvme.volume.size "name" "cache.nvme.volume.size") | float64 -}}
{{- if gt $needs $size -}}
{{- fail (printf "cache.nvme.capacity = %q does not fit into cache.nvme.volume.size = %q: with the index and what file systems keep it takes %.0f MiB; lower the capacity, or leave the size out to have it computed" $nvme.capacity $nvme.volume.size $needs) -}}
{{- end -}}
{{- end -}}
{{- if $cache.memory -}}
{{- $given := include "kvtier.cacheMemoryMib" . | float64 -}}
{{- $needs := include "kvtier.cacheNeedsMib" . | float64 -}}
{{- if gt $needs $given -}}
{{- fail (printf "cache.hostCapacity = %q does not fit into cache.memory = %q: with the index it takes %.0f MiB; lower the capacity, or leave cache.memory out to have it computed" $cache.hostCapacity $cache.memory $needs) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range $cache.users -}}
{{- $names = append $names (toString .name) -}}
{{- end -}}
{{- if ne (len (uniq $names)) (len $names) -}}
{{- fail (printf "cache.users: two of %s have the same name" (join ", " $names)) -}}
{{- end -}}
{{- if has "default" $names -}}
{{- fail "cache.users: default is the user of secret.password: give yours another name" -}}
{{- end -}}
{{- $value := include "kvtier.bytes" (dict "value" $cache.maxValue "name" "cache.maxValue") | float64 -}}
{{- if gt $value (include "kvtier.bytes" (dict "value" $cache.hostCapacity "name" "cache.hostCapacity") | float64) -}}
{{- fail (printf "cache.maxValue = %q is more than cache.hostCapacity = %q can hold: lower it, or raise the capacity" $cache.maxValue $cache.hostCapacity) -}}
{{- end -}}
{{- if and $cache.tcp.tlsSecretName (not $cache.tcp.enabled) -}}
{{- fail (printf "cache.tcp.tlsSecretName = %q without cache.tcp.enabled = true: set it, or leave the name out" $cache.tcp.tlsSecretName) -}}
{{- end -}}
{{- end -}}
