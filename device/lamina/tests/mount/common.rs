//! What the tests share: a mounted device, and checkpoints written here, by other code than reads
//! them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use lamina_reference::Format;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A directory with everything that a test needs, and the devices that it mounted.
pub(crate) struct Place {
    directory: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("run")).unwrap();
        Self { directory }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> String {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), bytes).unwrap();
        self.text(name)
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lamina"));
        command.args(words).env("XDG_RUNTIME_DIR", self.path("run")).current_dir(self.directory.path());
        command
    }

    pub(crate) fn lamina(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    /// What a command says that succeeds.
    pub(crate) fn said(&self, words: &[&str]) -> String {
        let output = self.lamina(words);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{words:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a command says that fails.
    pub(crate) fn refused(&self, words: &[&str]) -> String {
        let output = self.lamina(words);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stdout));
        assert!(!said.contains("panicked"), "{said}");
        said
    }

    /// Mounts models on `m`: what is told of that.
    pub(crate) fn mount(&self, words: &[&str]) -> Value {
        let mount = self.text("m");
        serde_json::from_str(&self.said(&[&["mount", "--json"], words, &[&mount]].concat())).unwrap()
    }

    /// Serves a device until what this gives is dropped, or says why not.
    pub(crate) fn serve(&self, words: &[&str]) -> Result<Served, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lamina"));
        command.arg("serve").args(words).current_dir(self.directory.path());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_default();
        if ready["ready"] == true {
            return Ok(Served { child });
        }
        let output = child.wait_with_output().unwrap();
        Err(String::from_utf8(output.stderr).unwrap())
    }

    /// Something under `models/`.
    pub(crate) fn model(&self, path: &str) -> PathBuf {
        self.path("m/models").join(path)
    }

    pub(crate) fn read(&self, path: &str) -> Vec<u8> {
        fs::read(self.model(path)).unwrap_or_else(|why| panic!("{path}: {why}"))
    }

    /// An extended attribute of a file, by the system's own call.
    pub(crate) fn attribute(&self, path: &str, name: &str) -> Option<String> {
        let mut value = [0; 256];
        let name = format!("user.lamina.{name}");
        let found = rustix::fs::getxattr(self.model(path), name.as_str(), &mut value[..]);
        Some(String::from_utf8(value[..found.ok()?].to_vec()).unwrap())
    }
}

/// A device that is served in the foreground.
#[derive(Debug)]
pub(crate) struct Served {
    child: Child,
}

impl Drop for Served {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // It may be unmounted already.
        let _ = self.lamina(&["umount", &self.text("m")]);
    }
}

/// Bytes by a plain generator, the same for a seed.
pub(crate) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(&mut next).flatten().take(bytes).collect()
}

/// Floats of a format: noise of all kinds, among it NaN, infinities, zeros of both signs and
/// denormals.
pub(crate) fn floats(format: Format, seed: u64, count: usize) -> Vec<u8> {
    let width = format.bits() as usize / 8;
    let special: &[u32] = match format {
        Format::Fp32 => {
            &[0x7fc0_0000, 0xffc0_0001, 0x7f80_0000, 0xff80_0000, 0, 0x8000_0000, 1, 0x807f_ffff, 0x7f80_0001]
        }
        Format::Fp16 => &[0x7e00, 0xfe01, 0x7c00, 0xfc00, 0, 0x8000, 1, 0x83ff],
        _ => &[0x7fc0, 0xffc1, 0x7f80, 0xff80, 0, 0x8000, 1, 0x807f],
    };
    let mut bytes = noise(seed, count * width);
    for (element, bits) in bytes.chunks_exact_mut(width).step_by(7).zip(special.iter().cycle()) {
        element.copy_from_slice(&bits.to_le_bytes()[..width]);
    }
    bytes
}

/// A tensor of a checkpoint: name, dtype, shape, bytes.
pub(crate) type Tensor<'a> = (&'a str, &'a str, Vec<u64>, Vec<u8>);

/// A safetensors file.
pub(crate) fn safetensors(tensors: &[Tensor<'_>]) -> Vec<u8> {
    let mut header = json!({ "__metadata__": { "format": "pt" } });
    let mut at = 0;
    for (name, dtype, shape, bytes) in tensors {
        let end = at + bytes.len();
        header[name] = json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] });
        at = end;
    }
    let text = header.to_string();
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text.as_bytes());
    for (.., bytes) in tensors {
        file.extend_from_slice(bytes);
    }
    file
}

/// The header of a safetensors file, and where its data begins.
pub(crate) fn header(file: &[u8]) -> (Value, usize) {
    let length = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    (serde_json::from_slice(&file[8..8 + length]).unwrap(), 8 + length)
}

/// A tensor's bytes in a safetensors file.
pub(crate) fn tensor<'a>(file: &'a [u8], name: &str) -> &'a [u8] {
    let (header, start) = header(file);
    let at = |index: usize| usize::try_from(header[name]["data_offsets"][index].as_u64().unwrap()).unwrap();
    &file[start + at(0)..start + at(1)]
}

/// A GGUF file: tensors by name, type, dimensions (innermost first) and bytes.
pub(crate) fn gguf(tensors: &[(&str, u32, Vec<u64>, Vec<u8>)]) -> Vec<u8> {
    const ALIGNMENT: usize = 64;
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend_from_slice(&(text.len() as u64).to_le_bytes());
        out.extend_from_slice(text.as_bytes());
    };
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    out.extend_from_slice(&3_u64.to_le_bytes());
    text(&mut out, "general.architecture");
    out.extend_from_slice(&8_u32.to_le_bytes());
    text(&mut out, "llama");
    text(&mut out, "general.alignment");
    out.extend_from_slice(&4_u32.to_le_bytes());
    out.extend_from_slice(&u32::try_from(ALIGNMENT).unwrap().to_le_bytes());
    text(&mut out, "tokenizer.ggml.tokens");
    out.extend_from_slice(&9_u32.to_le_bytes());
    out.extend_from_slice(&8_u32.to_le_bytes());
    out.extend_from_slice(&2_u64.to_le_bytes());
    text(&mut out, "<s>");
    text(&mut out, "ü");
    let mut data = Vec::new();
    for (name, kind, dimensions, bytes) in tensors {
        text(&mut out, name);
        out.extend_from_slice(&u32::try_from(dimensions.len()).unwrap().to_le_bytes());
        for n in dimensions {
            out.extend_from_slice(&n.to_le_bytes());
        }
        out.extend_from_slice(&kind.to_le_bytes());
        out.extend_from_slice(&(data.len() as u64).to_le_bytes());
        data.extend_from_slice(bytes);
        data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out.extend_from_slice(&data);
    out
}

/// The bundled model.
pub(crate) fn bundled() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../guest-tests/models/stories260K-bf16.safetensors"))
}

/// A view of a tensor as the reference has it, or what it is where the format cannot give it.
pub(crate) fn reference(format: Format, spelling: &str, bytes: &[u8]) -> Option<Vec<u8>> {
    let elements = bytes.len() as u64 * 8 / u64::from(format.bits());
    lamina_reference::view_bytes(format, spelling, bytes, elements).ok()
}
