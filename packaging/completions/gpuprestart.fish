# fish completion for gpuprestart

# Services that systemd knows, but for masked ones and such as it only has heard of.
function __gpuprestart_units
    begin
        systemctl list-unit-files --type=service --no-legend --no-pager --plain
        systemctl list-units --all --type=service --no-legend --no-pager --plain
    end 2>/dev/null | while read --local --delimiter ' ' unit rest
        string match --quiet --regex '^ *(masked|not-found)' -- $rest
        or echo $unit
    end
end

# Services that could be started: a template as a whole cannot.
function __gpuprestart_startable
    __gpuprestart_units | string match --invert '*@.service'
end

# Services that have the drop-in of "gpuprestart enable".
function __gpuprestart_enabled
    for file in /etc/systemd/system/*.service.d/50-gpuprestart.conf
        string replace --regex '^.*/(.*)\.d/50-gpuprestart\.conf$' '$1' -- $file
    end
end

complete -c gpuprestart -f

complete -c gpuprestart -n __fish_use_subcommand -a clean -d 'The hook: end stale holders, wait for the memory'
complete -c gpuprestart -n __fish_use_subcommand -a check -d 'What clean would do now; touches nothing'
complete -c gpuprestart -n __fish_use_subcommand -a status -d 'GPUs and their holders'
complete -c gpuprestart -n __fish_use_subcommand -a history -d 'Earlier runs, as the journal has them'
complete -c gpuprestart -n __fish_use_subcommand -a proof -d 'The last verdict on a unit\'s GPUs, to be filed'
complete -c gpuprestart -n __fish_use_subcommand -a enable -d 'Put the hook in front of a service'
complete -c gpuprestart -n __fish_use_subcommand -a disable -d 'Take that drop-in away again'
complete -c gpuprestart -n __fish_use_subcommand -a doctor -d 'What would make the hook fail, or be ignored'
complete -c gpuprestart -n __fish_use_subcommand -a bypass -d 'Let the next start of a unit pass unproved, once'
complete -c gpuprestart -n __fish_use_subcommand -l version -d 'Say the version'
complete -c gpuprestart -s h -l help -d 'Say what can be typed'

complete -c gpuprestart -n '__fish_seen_subcommand_from clean check' -l unit -x -a '(__gpuprestart_startable)' -d 'Policy and GPUs of this unit'
complete -c gpuprestart -n '__fish_seen_subcommand_from clean check' -l policy -r -F -d 'This policy instead of the search path'
complete -c gpuprestart -n '__fish_seen_subcommand_from clean check' -l gpus -x -a 'all unit' -d 'Indices, UUIDs or PCI addresses'
complete -c gpuprestart -n '__fish_seen_subcommand_from clean check' -l deadline -x -d 'For everything, such as 120s'
complete -c gpuprestart -n '__fish_seen_subcommand_from clean check status history doctor' -l json -d 'As JSON on standard output'
complete -c gpuprestart -n '__fish_seen_subcommand_from check' -l journal -d 'Also write the verdict to the journal'

complete -c gpuprestart -n '__fish_seen_subcommand_from check status history doctor' -s H -l host -x -a '(__fish_print_hostnames)' -d 'Ask this machine instead, by ssh'
complete -c gpuprestart -n '__fish_seen_subcommand_from status' -l csv -d 'Index and used memory, as nvidia-smi prints them'
complete -c gpuprestart -n '__fish_seen_subcommand_from status' -l watch -d 'Look again every so many seconds'
complete -c gpuprestart -n '__fish_seen_subcommand_from history' -l since -x -a 'today yesterday' -d 'No earlier ones'
complete -c gpuprestart -n '__fish_seen_subcommand_from history' -s n -l number -x -d 'So many, the newest'
complete -c gpuprestart -n '__fish_seen_subcommand_from history' -l svg -r -F -d 'Draw the last of these runs into this file'
complete -c gpuprestart -n '__fish_seen_subcommand_from history' -a show -d 'One run as a story'

complete -c gpuprestart -n '__fish_seen_subcommand_from enable doctor history proof' -a '(__gpuprestart_units)'
complete -c gpuprestart -n '__fish_seen_subcommand_from bypass' -a '(__gpuprestart_startable)'
complete -c gpuprestart -n '__fish_seen_subcommand_from disable' -a '(__gpuprestart_enabled)'
complete -c gpuprestart -n '__fish_seen_subcommand_from disable' -l all -d 'Every drop-in that enable has written'
complete -c gpuprestart -n '__fish_seen_subcommand_from enable disable' -l now -d 'Have systemd reload its units at once'
complete -c gpuprestart -n '__fish_seen_subcommand_from enable disable' -l dry-run -d 'Show what would be done, and do nothing'
