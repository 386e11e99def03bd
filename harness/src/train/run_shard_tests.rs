//! Tests of runs whose optimizer state is sharded: saving, and resuming on any number of ranks.

use super::*;

/// Values, and this rank's moments with their ranges.
type State = (Vec<f32>, Vec<(std::ops::Range<usize>, Vec<f32>, Vec<f32>)>);

fn state(run: &Run<'_>) -> State {
    let moments = run.trainer.moments().into_iter();
    let pieces = moments.map(|piece| (piece.range, piece.first.to_vec().unwrap(), piece.second.to_vec().unwrap()));
    (run.model.params().values().to_vec1().unwrap(), pieces.collect())
}

/// First and second moments of all ranks.
fn whole(states: &[State]) -> [Vec<f32>; 2] {
    let mut flats = [vec![f32::NAN; states[0].0.len()], vec![f32::NAN; states[0].0.len()]];
    for (range, first, second) in states.iter().flat_map(|(_, pieces)| pieces) {
        assert!(flats[0][range.clone()].iter().all(|x| x.is_nan()), "every element is kept by one rank");
        flats[0][range.clone()].copy_from_slice(first);
        flats[1][range.clone()].copy_from_slice(second);
    }
    flats
}

/// State saved by a sharded optimizer can be loaded with any world size, with the same bits, from one file or several.
#[test]
fn sharded_state_resumes_in_any_world() {
    let (dir, data) = set_up();
    let vocabulary = data.tokenizer.vocabulary();
    // Buckets of less than a row: shards start anywhere.
    let ddp = DdpOptions { bucket_bytes: Some(1000), ..DdpOptions::default() };
    let begin = |comm: Communicator,
                 shard: Option<Mode>,
                 steps: u64,
                 folder: &Path,
                 resume: bool,
                 then: &mut dyn FnMut(&mut Run<'_>)| {
        let data_parallel = DataParallelOptions { ddp, ..data_parallel(comm, shard) };
        let model = Bigrams::of(&data);
        let from = resume.then(|| Checkpoint::open(&folder.join(CHECKPOINT)).unwrap());
        let options = RunOptions { steps, micro_batch: 6, save_every: Some(3), evaluate_every: 0, ..options(6) };
        let setup = RunSetup::new(&model, &data, options, folder);
        let (from, data_parallel) = (from.as_ref(), Some(&data_parallel));
        let mut run = Run::begin_with(RunSetup { from, data_parallel, ..setup }).unwrap();
        then(&mut run);
    };
    for (mode, saved_by) in [(Some(Mode::Zero1), 2), (Some(Mode::Zero1), 3), (Some(Mode::Broadcast), 2), (None, 2)] {
        let folder = dir.path().join(format!("{mode:?} {saved_by}"));
        let saved = ranks(saved_by, |comm| {
            let mut found = None;
            begin(comm, mode, 4, &folder, false, &mut |run| {
                assert_eq!(run.train(&AtomicBool::new(false), &mut TestObserver::default()).unwrap(), Ending::Done);
                found = Some(state(run));
            });
            found.unwrap()
        });
        let expected = match mode {
            Some(_) => whole(&saved),
            None => whole(&saved[..1]),
        };
        let parts = if mode.is_some() { saved_by } else { 0 };
        // Of the last step and of step 3.
        assert_eq!(names(&folder).iter().filter(|name| name.starts_with("moments-")).count(), 2 * parts);
        for (again, world) in
            [(None, 1), (Some(Mode::Zero1), 1), (Some(Mode::Zero1), 3), (Some(Mode::Broadcast), 2), (mode, saved_by)]
        {
            let loaded = ranks(world, |comm| {
                let mut found = None;
                begin(comm, again, 5, &folder, true, &mut |run| found = Some(state(run)));
                found.unwrap()
            });
            assert!(
                loaded.iter().all(|(values, _)| *values == saved[0].0),
                "{mode:?}, {saved_by} to {again:?}, {world}"
            );
            let found = if again.is_some() { whole(&loaded) } else { whole(&loaded[..1]) };
            for (found, expected) in found.iter().zip(&expected) {
                // Padding is undefined, and no shard has it.
                let table = found.iter().zip(expected).take(vocabulary * vocabulary);
                assert!(
                    table.clone().all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{mode:?}, {saved_by} to {again:?}, {world}"
                );
            }
        }
        // Two more steps on the same number of ranks equal those of an uninterrupted run.
        let go_on = |folder: &Path, resume: bool| {
            ranks(saved_by, |comm| {
                let mut found = None;
                begin(comm, mode, 6, folder, resume, &mut |run| {
                    run.train(&AtomicBool::new(false), &mut TestObserver::default()).unwrap();
                    found = Some(state(run));
                });
                found.unwrap()
            })
        };
        let straight = go_on(&dir.path().join(format!("{mode:?} {saved_by} straight")), false);
        assert!(go_on(&folder, true) == straight, "{mode:?}, {saved_by}");
    }
}

/// A shard that is missing, damaged, or of another checkpoint.
#[test]
fn shards_of_another_checkpoint_are_refused() {
    let (dir, data) = set_up();
    let folder = dir.path().join("run");
    zero1_ranks(&data, RunOptions { save_every: Some(1), ..options(2) }, &folder, |run, _| _ = go(run));
    let parts: Vec<PathBuf> =
        names(&folder).iter().filter(|name| name.starts_with("moments-")).map(|name| folder.join(name)).collect();
    assert_eq!(parts.len(), 4, "two checkpoints of two ranks");
    let load = || {
        let model = Bigrams::of(&data);
        let mut trainer = Trainer::new(model.params(), options(2).trainer).unwrap();
        Checkpoint::open(&folder.join(CHECKPOINT)).unwrap().load(&mut trainer)
    };
    load().unwrap();
    let newest = parts
        .iter()
        .find(|path| path.to_str().unwrap().contains("moments-00000002") && path.to_str().unwrap().contains("-1-of-2"))
        .unwrap();
    let whole = std::fs::read(newest).unwrap();
    let others: Vec<Vec<u8>> =
        parts.iter().filter(|path| *path != newest).map(|path| std::fs::read(path).unwrap()).collect();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 4;
    let refuse = |bytes: &[u8], what: &str| {
        std::fs::write(newest, bytes).unwrap();
        let message = load().unwrap_err().to_string();
        let name = newest.file_name().unwrap().to_str().unwrap();
        assert!(message.contains(name) && message.contains(what), "{message}");
    };
    refuse(&flipped, "damaged");
    refuse(&whole[..whole.len() / 2], "truncated");
    others.iter().for_each(|other| refuse(other, "shard of another checkpoint"));
    std::fs::remove_file(newest).unwrap();
    let message = load().unwrap_err().to_string();
    assert!(message.contains("cannot read") && message.contains("-1-of-2"), "{message}");
}

/// A rank that cannot save its shard ends all ranks, and nothing is committed.
#[test]
fn a_shard_that_fails_commits_nothing() {
    let (dir, data) = set_up();
    let folder = dir.path().join("run");
    let messages = zero1_ranks(&data, options(9), &folder, |run, comm| {
        run.step().unwrap();
        run.save().unwrap();
        run.step().unwrap();
        if comm.rank() == 1 {
            let (step, scale) = (run.trainer.step(), run.trainer.scale());
            let nan = |_: usize, range: std::ops::Range<usize>, mut to: tilewright::ViewMut<'_, f32>| {
                Ok(to.copy_from_slice(&vec![f32::NAN; range.len()])?)
            };
            run.trainer.restore(step, scale, step, nan).unwrap();
        }
        let error = run.save().unwrap_err().to_string();
        // As `Run::train` does after an error.
        comm.abort(&error);
        error
    });
    assert!(messages[1].contains("`optimizer.first.table") && messages[1].contains("is not finite"), "{}", messages[1]);
    assert!(messages[0].contains("rank 1"), "{}", messages[0]);
    assert_eq!(Checkpoint::open(&folder.join(CHECKPOINT)).unwrap().header.step, 1);
    let model = Bigrams::of(&data);
    let mut trainer = Trainer::new(model.params(), options(9).trainer).unwrap();
    Checkpoint::open(&folder.join(CHECKPOINT)).unwrap().load(&mut trainer).unwrap();
}
