{{- /* An image: (list $ NAME). */}}
{{- define "sluice.image" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $own := get $root.Values.images $name | default dict }}
{{- with $root.Values.image.registry }}{{ . }}/{{ end }}
{{- $own.newName | default $name }}:{{ $own.newTag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{- define "sluice.pull" -}}
{{- with .Values.image.pullPolicy }}imagePullPolicy: {{ . }}{{ end }}
{{- end }}

{{- /* A variable: (list ENV NAME DEFAULT). */}}
{{- define "sluice.value" -}}
{{- $own := index . 0 | default dict }}{{ $name := index . 1 -}}
{{- ternary (get $own $name) (index . 2) (hasKey $own $name) | quote }}
{{- end }}

{{- /* Variables that a workload has not itself: (list ENV NAMES-IT-HAS NAMES-THAT-ARE-NOT-PLAIN). */}}
{{- define "sluice.env" -}}
{{- $own := index . 0 | default dict }}{{ $plain := index . 1 }}
{{- range $name := index . 2 }}{{ if hasKey $own $name }}
{{- fail (printf "env.%s is not a plain value: set it in `secrets`, `backends` or `engine`" $name) }}
{{- end }}{{ end }}
{{- range $name, $value := $own }}{{ if not (has $name $plain) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}{{ end }}
{{- end }}

{{- /* New addresses make new pods, as a new name of the ConfigMap does with kustomize: (list $ VALUES). */}}
{{- define "sluice.annotations" -}}
{{- $root := index . 0 }}{{ $own := index . 1 -}}
annotations:
  checksum/backends: {{ toJson $root.Values.backends | sha256sum | trunc 16 | quote }}
  {{- with $own.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{- define "sluice.placement" -}}
{{- $root := index . 0 }}{{ $own := index . 1 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "sluice.claim" -}}
accessModes: [ReadWriteOnce]
resources:
  requests:
    storage: {{ .size }}
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* The StatefulSets that the control plane may scale. */}}
{{- define "sluice.scaled" -}}
{{- $names := list }}
{{- range .Values.nodeScaling.actuators }}{{ if eq .kind "kubernetes" }}{{ $names = append $names .nodes }}{{ end }}{{ end }}
{{- toYaml (uniq $names) }}
{{- end }}
