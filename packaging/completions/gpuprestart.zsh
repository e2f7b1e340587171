#compdef gpuprestart
# zsh completion for gpuprestart

# Services that systemd knows, but for masked ones and such as it only has heard of, into the array of the caller.
_gpuprestart_known() {
    local unit state rest
    {
        systemctl list-unit-files --type=service --no-legend --no-pager --plain
        systemctl list-units --all --type=service --no-legend --no-pager --plain
    } 2>/dev/null | while read -r unit state rest; do
        [[ $state == (masked*|not-found) ]] || units+=("$unit")
    done
}

_gpuprestart_units() {
    local -a units
    _gpuprestart_known
    compadd "$@" -a units
}

# Services that could be started: a template as a whole cannot.
_gpuprestart_startable() {
    local -a units
    _gpuprestart_known
    units=(${units:#*@.service})
    compadd "$@" -a units
}

_gpuprestart_past() {
    _gpuprestart_units "$@"
    compadd "$@" show
}

# Services that have the drop-in of "gpuprestart enable".
_gpuprestart_enabled() {
    local -a units
    units=(/etc/systemd/system/*.service.d/50-gpuprestart.conf(N:h:t:r))
    compadd "$@" -a units
}

_gpuprestart() {
    local context state state_descr line
    local -A opt_args
    local -a verbs help judging writing remote
    verbs=(
        'clean:the hook\: end stale holders, wait for the memory'
        'check:what clean would do now; touches nothing'
        'status:GPUs and their holders'
        'history:earlier runs, as the journal has them'
        "proof:the last verdict on a unit's GPUs, to be filed"
        'enable:put the hook in front of a service'
        'disable:take that drop-in away again'
        'doctor:what would make the hook fail, or be ignored'
        'bypass:let the next start of a unit pass unproved, once'
    )
    help=('(- *)'{-h,--help}'[say what can be typed]')
    judging=(
        '--unit=[policy and GPUs of this unit]:unit:_gpuprestart_startable'
        '--policy=[this policy instead of the search path]:file:_files'
        '--gpus=[indices, UUIDs or PCI addresses, separated by commas]:GPUs:(all unit)'
        '--deadline=[for everything, such as 120s]:duration:'
        '--json[the verdict as JSON on standard output]'
    )
    remote=('*'{-H,--host=}'[ask this machine instead, by ssh]:host:_hosts')
    writing=(
        '--now[have systemd reload its units at once]'
        '--dry-run[show what would be done, and do nothing]'
    )
    _arguments -C $help '(- *)--version[say the version]' '1:verb:->verb' '*::argument:->argument' && return
    case $state in
        verb) _describe verb verbs ;;
        argument)
            case $words[1] in
                clean) _arguments $help $judging ;;
                check) _arguments $help $judging $remote '--journal[also write the verdict to the journal]' ;;
                status)
                    _arguments $help $remote '(--csv --watch)--json[as JSON on standard output]' \
                        '(--json --watch)--csv[index and used memory, as nvidia-smi prints them]' \
                        '(--json --csv)--watch=-[look again every so many seconds]::seconds:'
                    ;;
                history)
                    _arguments $help $remote '--json[a list of verdicts, the newest last]' \
                        '--since=[no earlier ones]:time:(today yesterday)' {-n,--number=}'[so many, the newest]:number:' \
                        '--svg=[draw the last of these runs into this file]:file:_files' '1:unit:_gpuprestart_past' \
                        '2:run:'
                    ;;
                proof) _arguments $help '1:unit:_gpuprestart_units' ;;
                enable) _arguments $help $writing '*:unit:_gpuprestart_units' ;;
                disable)
                    _arguments $help $writing '(*)--all[every drop-in that enable has written]' \
                        '*:unit:_gpuprestart_enabled'
                    ;;
                doctor) _arguments $help $remote '--json[as JSON on standard output]' '1:unit:_gpuprestart_units' ;;
                bypass) _arguments $help '1:unit:_gpuprestart_startable' ;;
            esac
            ;;
    esac
}

_gpuprestart "$@"
