{% if shell == "zsh" %}
autoload -U +X bashcompinit && bashcompinit
{% endif %}
_mispair() {
  local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""
  case " {{ groups | join(" ") }} " in *" $command "*)
    [ "$COMP_CWORD" -gt 2 ] && command="$command ${COMP_WORDS[2]}" ;; esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{{ first | join(" ") }}"; else case "$command" in
{% for name, own in options.items() %}
    "{{ name }}") words="{{ own | join(" ") }}" ;;
{% endfor %}
{% for group, names in groups.items() %}
    "{{ group }}") words="{{ names | join(" ") }}" ;;
{% endfor %}
  esac; fi
  case "${COMP_WORDS[COMP_CWORD-1]} $current" in "--"*" ") words="" ;; esac  # a value: mostly a file
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _mispair mispair
