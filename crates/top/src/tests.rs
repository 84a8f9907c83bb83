use super::*;

#[allow(dead_code, reason = "tests of other crates use the rest")]
#[path = "../../report/tests/common/host.rs"]
mod example;

fn picture() -> Picture {
    Picture {
        host: example::host(),
        detail: Some(Detail {
            key: Key::Vm("web".to_owned()),
            subject: Subject::Vm(Box::new(example::vm("web").unwrap())),
            samples: example::history("web").samples,
        }),
        decisions: example::decisions(),
    }
}

fn screen() -> Screen {
    let mut screen = Screen::default();
    screen.update(Ok(picture()));
    screen
}

fn press(screen: &mut Screen, code: KeyCode) -> KeyAction {
    super::press(screen, KeyEvent::new(code, KeyModifiers::NONE))
}

/// The selected VM, shared with the thread that queries the daemon.
fn selected(pressed: KeyAction) -> String {
    match selected_key(pressed) {
        Key::Vm(vm) => vm,
        other => panic!("{other:?}"),
    }
}

/// What is selected, as [`selected`] has it.
fn selected_key(pressed: KeyAction) -> Key {
    match pressed {
        KeyAction::Send(WorkerCommand::Selected(key)) => key,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_frame_of_80_by_24_holds_host_vms_detail_and_decisions() {
    let text = frame(&mut screen(), (80, 24)).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 24);
    assert!(
        lines.iter().all(|line| Span::raw(*line).width() <= 80),
        "{text}"
    );
    for part in [
        "Plimsoll example  mode advise  whole  turn 120 of 30 s",
        "could take 120 MiB of 1.5 GiB: █ own 1.25 GiB  ▓ cache 128 MiB  ░ spare 128 MiB",
        "tight",
        " misses by size ",
        "misses 1.03 (0.98 to 1.08)",
        "! the history is off",
        "proposed web could give 64 MiB",
        "q quit",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!text.contains('\u{1b}') && !text.contains('\u{9b}'));
}

#[test]
fn control_groups_stand_below_the_vms_and_can_be_selected() {
    let mut picture = picture();
    let view = example::group("nginx.service").unwrap();
    let mut screen = screen();
    let steps = picture.host.vms.len() + picture.host.groups.watched.len();
    let keys: Vec<_> = (0..steps)
        .map(|_| selected_key(press(&mut screen, KeyCode::Down)))
        .collect();
    let key = Key::Group("/system.slice/nginx.service".to_owned());
    assert_eq!(keys.last(), Some(&key));
    picture.detail = Some(Detail {
        key,
        subject: Subject::Group(Box::new(view)),
        samples: example::history("nginx.service").samples,
    });
    screen.update(Ok(picture));
    let text = frame(&mut screen, (120, 40)).unwrap();
    for part in [
        ">nginx.service",
        "systemd",
        "control group (systemd): only",
        "charged 300 MiB, limit 512 MiB",
        "uses 180 MiB",
        " ┊ now ",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(
        !text.contains("⡇ baseline") && !text.contains('\u{1b}'),
        "{text}"
    );
}

#[test]
fn any_size_of_terminal_gets_a_frame() {
    for size in [(1, 1), (71, 24), (80, 17), (72, 18), (200, 60), (300, 19)] {
        for open in [false, true] {
            let mut screen = screen();
            if open {
                screen.open_or_close();
            }
            let text = frame(&mut screen, size).unwrap();
            assert_eq!(text.lines().count(), usize::from(size.1), "{size:?}");
        }
    }
}

#[test]
fn arrows_walk_the_list_in_the_order_of_the_sort_key() {
    let mut screen = screen();
    // By status: mail (tight), the hostile one (unknown), web (safe). The picture shows web.
    assert_eq!(selected(press(&mut screen, KeyCode::Up)), example::HOSTILE);
    assert_eq!(selected(press(&mut screen, KeyCode::Up)), "mail");
    assert_eq!(selected(press(&mut screen, KeyCode::Up)), "mail");
    for _ in 0..2 {
        assert!(matches!(
            press(&mut screen, KeyCode::Char('s')),
            KeyAction::Nothing
        ));
    }
    // By size: web is the largest, then by name.
    assert_eq!(selected(press(&mut screen, KeyCode::Up)), example::HOSTILE);
    assert_eq!(selected(press(&mut screen, KeyCode::Up)), "web");
}

#[test]
fn a_pause_is_asked_for_and_only_y_says_yes() {
    let mut screen = screen();
    for (answer, wanted) in [('n', None), ('q', None), ('y', Some(PauseRequest::Pause))] {
        press(&mut screen, KeyCode::Char('p'));
        let text = frame(&mut screen, (80, 24)).unwrap();
        assert!(text.contains("Move nothing from now on? y / n"), "{text}");
        let wish = match press(&mut screen, KeyCode::Char(answer)) {
            KeyAction::Send(WorkerCommand::Pause(wish)) => Some(wish),
            KeyAction::Nothing => None,
            other => panic!("{other:?}"),
        };
        assert_eq!(wish, wanted);
    }
    let mut paused = picture();
    paused.host.paused = true;
    screen.update(Ok(paused));
    assert!(frame(&mut screen, (80, 24)).unwrap().contains("PAUSED"));
    press(&mut screen, KeyCode::Char('p'));
    let resumed = press(&mut screen, KeyCode::Char('y'));
    assert!(matches!(
        resumed,
        KeyAction::Send(WorkerCommand::Pause(PauseRequest::Resume))
    ));
}

#[test]
fn enter_opens_a_vm_escape_goes_back_and_then_leaves() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Enter);
    let open = frame(&mut screen, (80, 24)).unwrap();
    assert!(!open.contains(" target "), "{open}");
    assert!(open.contains("tracer tracing, lost 0"), "{open}");
    assert!(matches!(
        press(&mut screen, KeyCode::Esc),
        KeyAction::Nothing
    ));
    assert!(matches!(press(&mut screen, KeyCode::Esc), KeyAction::Leave));
    assert!(matches!(
        press(&mut screen, KeyCode::Char('q')),
        KeyAction::Leave
    ));
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert!(matches!(
        super::press(&mut screen, interrupt),
        KeyAction::Leave
    ));
}

#[test]
fn a_daemon_that_went_away_leaves_the_last_picture_and_says_so() {
    let mut screen = screen();
    screen.update(Err("cannot reach plimsolld\u{1b}[2J".to_owned()));
    let text = frame(&mut screen, (80, 24)).unwrap();
    assert!(
        text.contains("NO ANSWER") && text.contains("cannot reach plimsolld\u{fffd}[2J"),
        "{text}"
    );
    assert!(text.contains("web"), "{text}");
    let mut never = Screen::default();
    never.update(Err("cannot reach plimsolld".to_owned()));
    assert!(
        frame(&mut never, (80, 24))
            .unwrap()
            .starts_with("cannot reach plimsolld\n")
    );
}

#[test]
fn a_host_without_vms_and_a_curve_that_is_none_are_no_trouble() {
    let mut picture = picture();
    let mut view = example::vm("web").unwrap();
    view.curve.as_mut().unwrap().references = 0;
    picture.detail.as_mut().unwrap().subject = Subject::Vm(Box::new(view));
    let mut screen = Screen::default();
    screen.update(Ok(picture.clone()));
    let text = frame(&mut screen, (80, 24)).unwrap();
    assert!(
        text.contains("the daemon sent an invalid curve of VM web"),
        "{text}"
    );
    picture.host.vms.clear();
    picture.host.groups.watched.clear();
    picture.detail = None;
    picture.decisions.clear();
    picture.host.memory = plimsoll_protocol::vm::HostMemory::default();
    screen.update(Ok(picture));
    assert!(screen.step(1).is_none());
    let text = frame(&mut screen, (80, 24)).unwrap();
    assert!(text.contains("No VM was found."), "{text}");
}
