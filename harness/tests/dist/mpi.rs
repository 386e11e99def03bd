//! Tests of ranks that `mpirun` starts. The program of a rank is that of [`crate::processes`].

use std::process::Command;

fn mpirun(ranks: usize, what: &str) -> (Option<i32>, String) {
    let mut command = Command::new("mpirun");
    command.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
    command.args(["processes::program_of_a_rank", "--exact", "--nocapture"]);
    command.env("TILEWRIGHT_TEST_RANK", what).env("TILEWRIGHT_COMM_TIMEOUT", "60").env_remove("TILEWRIGHT_COMM");
    // Test machines have few cores, root users, and containers that cannot read each other's memory.
    for (name, value) in [
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("OMPI_MCA_mpi_yield_when_idle", "1"),
        ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"),
    ] {
        command.env(name, value);
    }
    // Runs of one user share a session folder of Open MPI, which the first run that ends would remove.
    let session = tempfile::tempdir().expect("a folder for Open MPI's session");
    command.env("TMPDIR", session.path());
    let output = command.output().expect("mpirun is installed where the feature mpi is built");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text)
}

#[test]
fn all_collectives_over_mpi() {
    for ranks in [1, 2, 4] {
        let (code, text) = mpirun(ranks, "suite");
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(text.matches("backend: mpi").count(), ranks, "{text}");
    }
}

#[test]
fn training_over_mpi_gives_the_weights_of_training_on_one_rank() {
    for ranks in [2, 4] {
        let (code, text) = mpirun(ranks, "train");
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(text.matches("backend: mpi").count(), ranks, "{text}");
    }
}

#[test]
fn faults_end_all_ranks() {
    let (code, text) = mpirun(3, "disagree");
    assert_ne!(code, Some(0));
    assert!(text.contains("the ranks disagree about collective 1") && text.contains("rank 2: barrier"), "{text}");
    let (code, text) = mpirun(3, "kill:1");
    assert!(code != Some(0) && text.contains("signal 9"), "{text}");
    let (code, text) = mpirun(3, "throw:1");
    assert!(code != Some(0) && text.contains("rank 1 aborted: it panicked"), "{text}");
    let (code, text) = mpirun(2, "leave:1");
    assert!(
        code != Some(0) && text.contains("rank 1 has ended") && text.contains("dropped its communicator"),
        "{text}"
    );
    let (code, text) = mpirun(2, "hang:1");
    assert!(code != Some(0) && text.contains("waited 5 s for rank 1 at all_reduce(sum) of 10000 f32"), "{text}");
}
