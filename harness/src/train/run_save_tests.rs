//! Tests of saves: slow ones, full disks, and files of earlier runs in the folder.

use super::*;

#[test]
fn a_newest_checkpoint_that_cannot_be_read_now_is_not_replaced() {
    let (dir, data) = set_up();
    let folder = dir.path().join("run");
    let model = Bigrams::of(&data);
    let mut run = Run::begin(&model, &data, options(9), &folder, None).unwrap();
    run.step().unwrap();
    // Opening it is an error of the file system, not a missing file.
    std::os::unix::fs::symlink(CHECKPOINT, folder.join(CHECKPOINT)).unwrap();
    let message = run.save().unwrap_err().to_string();
    assert!(message.contains("cannot write") && message.contains("symbolic link"), "{message}");
    assert_eq!(std::fs::read_link(folder.join(CHECKPOINT)).unwrap(), Path::new(CHECKPOINT));
}

/// Rank 1 takes longer to write than a collective's timeout; then rank 0, which alone writes without sharding.
#[test]
fn a_save_may_take_longer_than_a_collective_waits() {
    let (dir, data) = set_up();
    let check = |shard: Option<Mode>, slow: usize| {
        let folder = dir.path().join(slow.to_string());
        let limits = crate::dist::comm::Options { timeout: Duration::from_secs(4), ..Default::default() };
        let outcomes = ranks_with(2, limits, |comm| {
            let rank = comm.rank();
            let data_parallel = data_parallel(comm, shard);
            let model = Bigrams::of(&data);
            let options = RunOptions { save_every: Some(0), ..options(9) };
            let mut run = begin_on_rank(&model, &data, options, &folder, &data_parallel).unwrap();
            run.step().unwrap();
            let gate = run.saver.gate.clone();
            let (closed, is_closed) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let _closed = (rank == slow).then(|| gate.lock().unwrap());
                    closed.send(()).unwrap();
                    std::thread::sleep(if rank == slow { Duration::from_millis(6500) } else { Duration::ZERO });
                });
                is_closed.recv().unwrap();
                run.start_save().and_then(|()| run.start_save()).and_then(|()| run.save()).map_err(|e| e.to_string())
            })
        });
        assert_eq!(outcomes, [Ok(()), Ok(())], "{shard:?}");
        assert_eq!(Checkpoint::open(&folder.join(CHECKPOINT)).unwrap().header.step, 1);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| check(Some(Mode::Zero1), 1));
        check(None, 0);
    });
}

#[test]
fn ranks_that_write_into_one_folder_need_room_for_all() {
    let (dir, data) = set_up();
    let folder = dir.path().join("run");
    let messages = zero1_ranks(&data, options(9), &folder, |run, _| {
        let share = files::free_bytes(&folder).unwrap() / 10 * 7;
        run.saver.check_space_for_all(share, None).unwrap();
        run.saver.check_space_for_all(1, run.data_parallel.as_ref()).unwrap();
        run.saver.check_space_for_all(share, run.data_parallel.as_ref()).unwrap_err().to_string()
    });
    messages.iter().for_each(|message| assert!(message.contains("a checkpoint takes"), "{message}"));
}

/// Shards of a killed save may be what fills the disk.
#[test]
fn unreferenced_shards_are_removed_at_start() {
    let (dir, data) = set_up();
    let folder = dir.path().join("run");
    zero1_ranks(&data, RunOptions { save_every: Some(1), ..options(2) }, &folder, |run, _| _ = go(run));
    let whole = names(&folder);
    assert_eq!(whole.len(), 6, "two checkpoints of two ranks: {whole:?}");
    let left = [
        "moments-00000003-0123456789abcdef-1-of-2.safetensors",
        "moments-00000002-0000000000000001-0-of-2.safetensors",
    ];
    let leave = || left.iter().for_each(|name| std::fs::write(folder.join(name), "moments").unwrap());
    leave();
    RunFolder::lock(&folder).unwrap();
    assert_eq!(names(&folder), whole);
    // Some of them may belong to a newest checkpoint that cannot be read.
    leave();
    let all = names(&folder);
    std::fs::write(folder.join(CHECKPOINT), "damaged").unwrap();
    RunFolder::lock(&folder).unwrap();
    assert_eq!(names(&folder), all);
}

#[test]
fn a_run_whose_lock_was_removed_writes_nothing_more() {
    let (dir, data) = set_up();
    let model = Bigrams::of(&data);
    let folder = dir.path().join("run");
    let mut first = Run::begin(&model, &data, options(20), &folder, None).unwrap();
    first.save().unwrap();
    std::fs::remove_file(folder.join(crate::train::folder::LOCK)).unwrap();
    let other = Bigrams::of(&data);
    let mut second = Run::begin(&other, &data, options(3), &folder, None).unwrap();
    go(&mut second);
    let message = first.save().unwrap_err().to_string();
    assert!(message.contains("is no longer locked by this run"), "{message}");
    drop(first);
    assert!(second.save().is_ok(), "its lock is still there");
    assert_eq!(Checkpoint::open(&folder.join(CHECKPOINT)).unwrap().header.step, 3);
    drop(second);
    // A removed folder is reported, without claiming that it has a checkpoint.
    let mut third = Run::begin(&model, &data, options(3), &folder, None).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let message = third.train(&AtomicBool::new(false), &mut TestObserver::default()).unwrap_err().to_string();
    assert!(message.contains("was removed") && !message.contains("whole"), "{message}");
}
