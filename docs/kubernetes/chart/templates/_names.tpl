{{- define "kvfs.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "kvfs.chosen" -}}
app.kubernetes.io/name: kvfs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvfs.labels" -}}
{{ include "kvfs.chosen" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvfs.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvfs.mountpoint" -}}
{{ .Values.mounts.path }}/{{ .Values.mounts.name }}
{{- end }}
