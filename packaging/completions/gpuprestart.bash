# bash completion for gpuprestart

# Services that systemd knows, but for masked ones and such as it only has heard of.
_gpuprestart_units() {
    local unit state
    {
        systemctl list-unit-files --type=service --no-legend --no-pager --plain
        systemctl list-units --all --type=service --no-legend --no-pager --plain
    } 2>/dev/null | while read -r unit state _; do
        case $state in
            masked* | not-found) ;;
            *) printf '%s\n' "$unit" ;;
        esac
    done | sort -u
}

# Services that could be started: a template as a whole cannot.
_gpuprestart_startable() {
    local unit
    _gpuprestart_units | while read -r unit; do
        [[ $unit == *@.service ]] || printf '%s\n' "$unit"
    done
}

# Services that have the drop-in of "gpuprestart enable".
_gpuprestart_enabled() {
    local file
    for file in "${1:-/etc/systemd/system}"/*.service.d/50-gpuprestart.conf; do
        [[ -e $file ]] || continue
        file=${file%.d/50-gpuprestart.conf}
        printf '%s\n' "${file##*/}"
    done
}

_gpuprestart() {
    local line=${COMP_LINE:0:COMP_POINT} full= cur= prev= verb= option= word= mark= kept=
    local -a words=() found=()
    COMPREPLY=()
    # Words as the program will get them: bash takes a unit apart at its "@", and an option at its "=".
    read -ra words <<<"$line"
    if [[ $line != *[[:space:]] ]]; then
        full=${words[${#words[@]} - 1]}
        unset "words[${#words[@]}-1]"
    fi
    for word in "${words[@]:1}"; do
        [[ -z $verb && $word != -* ]] && verb=$word
        prev=$word
    done
    cur=$full
    case $verb,$prev in
        clean,--unit | check,--unit | clean,--policy | check,--policy) option=$prev ;;
        clean,--gpus | check,--gpus | clean,--deadline | check,--deadline) option=$prev ;;
        check,-H | check,--host | status,-H | status,--host | doctor,-H | doctor,--host) option=--host ;;
        history,-H | history,--host) option=--host ;;
        history,--since | history,-n | history,--number | history,--svg | status,--watch) option=$prev ;;
    esac
    if [[ -z $option && $verb =~ ^(clean|check|status|history|doctor)$ && $full == --*=* ]]; then
        option=${full%%=*}
        cur=${full#*=}
    fi
    # Also for units, in whose names readline then quotes the backslashes.
    [[ $option == --unit || $option == --policy || $option == --svg || (-n $verb && $cur != -*) ]] && compopt -o filenames 2>/dev/null
    case $option in
        --unit) mapfile -t words < <(_gpuprestart_startable) ;;
        --policy | --svg) mapfile -t words < <(compgen -f -- "$cur") ;;
        --host) mapfile -t words < <(compgen -A hostname -- "$cur") ;;
        --since) words=(today yesterday) ;;
        --gpus) words=(all unit) ;;
        --deadline | --watch | -n | --number) words=() ;;
        *)
            case $verb in
                '') words=(clean check status history proof enable disable doctor bypass --help --version) ;;
                clean) words=(--unit --policy --gpus --deadline --json --help) ;;
                check) words=(--unit --policy --gpus --deadline --json --journal --host --help) ;;
                status) words=(--json --csv --watch --host --help) ;;
                history) words=(--since --number --svg --json --host --help) ;;
                proof) words=(--help) ;;
                enable) words=(--now --dry-run --help) ;;
                disable) words=(--all --now --dry-run --help) ;;
                doctor) words=(--json --host --help) ;;
                bypass) words=(--help) ;;
                *) words=() ;;
            esac
            if [[ $cur != -* ]]; then
                case $verb in
                    enable) mapfile -t words < <(_gpuprestart_units) ;;
                    disable) mapfile -t words < <(_gpuprestart_enabled) ;;
                    doctor | proof) mapfile -t words < <(_gpuprestart_units) ;;
                    history) mapfile -t words < <(_gpuprestart_units && echo show) ;;
                    bypass) mapfile -t words < <(_gpuprestart_startable) ;;
                esac
            fi
            ;;
    esac
    # Not compgen -W, to which the backslash in the name of a unit would be an escape.
    for word in "${words[@]}"; do
        [[ $word == "$cur"* ]] && found+=("$word")
    done
    # readline replaces only what stands behind the last of its word breaks; an "@" belongs to what it replaces.
    for mark in @ : =; do
        word=${full%"${full##*"$mark"}"}
        word=${word%@}
        [[ $COMP_WORDBREAKS == *"$mark"* && ${#word} -gt ${#kept} ]] && kept=$word
    done
    for word in "${found[@]}"; do
        word=${full%"$cur"}$word
        COMPREPLY+=("${word#"$kept"}")
    done
}
complete -F _gpuprestart gpuprestart
