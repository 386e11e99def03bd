//! Links the object file that `with-llvm` wrote to the folder `COMPILED`.

fn main() {
    println!("cargo::rerun-if-env-changed=COMPILED");
    let folder = std::env::var("COMPILED").expect("COMPILED names a folder");
    println!("cargo::rerun-if-changed={folder}");
    println!("cargo::rustc-link-arg={folder}/double.o");
    println!("cargo::rustc-env=MANIFEST={folder}/manifest.json");
}
