//! The peers: codecs from PyPI, each timed by `guest-tests/bench/peers/measure.py` in a process of
//! its own, and what they answer.

use std::{path::Path, process::Command, time::Duration};

use lamina_codec::format::Format;
use serde::Deserialize;

use super::{
    Timed,
    install::Environment,
    report::{Copying, Measured, Outcome, Row},
};

/// A peer.
#[derive(Debug)]
pub struct Peer {
    /// What `measure.py` calls it.
    pub name: &'static str,
    /// Its rows, as `measure.py` names them.
    pub codecs: &'static [&'static str],
    /// The packages it needs, in the order of their installation; where there are several lists,
    /// the next is tried if one fails.
    pub packages: &'static [&'static [&'static str]],
}

/// All of them, in the order of the table.
pub const PEERS: [Peer; 4] = [
    // setuptools builds it: there is no wheel.
    Peer { name: "zipnn", codecs: &["ZipNN"], packages: &[&["setuptools", "zipnn"]] },
    Peer {
        name: "blosc2",
        codecs: &["Blosc2 bitshuffle + lz4", "Blosc2 shuffle + zstd-3"],
        packages: &[&["blosc2"]],
    },
    // hdf5plugin has the same library and a wheel for every Python, but for older processors.
    Peer {
        name: "bitshuffle",
        codecs: &["bitshuffle", "bitshuffle + lz4"],
        packages: &[&["bitshuffle"], &["hdf5plugin"]],
    },
    Peer { name: "pcodec", codecs: &["pcodec -8"], packages: &[&["numpy", "pcodec"]] },
];

/// What `measure.py` says.
pub type Answer = Outcome<PeerTimed>;

/// What was measured of a peer.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct PeerTimed {
    /// Package and version.
    pub version: String,
    /// Seconds of calling it in vain.
    pub call_seconds: f64,
    /// Its codecs.
    pub codecs: Vec<Timed>,
}

impl Environment {
    /// Has `peer` measured on the bytes of `file`, which are of `format`, for `time`.
    pub fn measure(&self, peer: &Peer, format: Format, file: &Path, time: Duration) -> Answer {
        let python = match self.python(peer) {
            Ok(python) => python,
            Err(why) => return Answer::NotInstalled { why },
        };
        // Isolated: nothing of the user's, neither modules nor settings.
        let mut command = Command::new(python);
        command.arg("-I").arg(self.program()).args([peer.name, format.name()]).arg(file);
        ask(command.arg(time.as_secs_f64().to_string()))
    }
}

/// The answer of a run of `measure.py`.
pub fn ask(command: &mut Command) -> Answer {
    let failed = |why: String| Answer::Failed { why };
    match command.output() {
        Err(why) => failed(format!("{} does not start: {why}", command.get_program().to_string_lossy())),
        Ok(output) if !output.status.success() => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("and says nothing");
            failed(format!("measure.py ends with {}: {last}", output.status))
        }
        Ok(output) => serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|why| failed(format!("measure.py gives an answer that is none: {why}"))),
    }
}

/// The rows of `peer`, from its answers of all turns: their samples together, or why there are
/// none. `bytes` is what was coded, `memcpy` what it is held against.
pub fn rows(peer: &Peer, answers: Vec<Answer>, bytes: u64, memcpy: Copying) -> Vec<Row> {
    let without = |outcome: Outcome| {
        let row = |codec: &&str| Row { codec: (*codec).to_owned(), version: None, outcome: outcome.clone() };
        peer.codecs.iter().map(row).collect()
    };
    let failed = |why: &str| without(Outcome::Failed { why: why.to_owned() });
    let mut turns = Vec::new();
    for answer in answers {
        match answer {
            Answer::Measured(timed) => turns.push(timed),
            Answer::NotInstalled { why } => return without(Outcome::NotInstalled { why }),
            Answer::NotApplicable { why } => return without(Outcome::NotApplicable { why }),
            Answer::Failed { why } => return failed(&why),
        }
    }
    let Some(version) = turns.first().map(|turn| turn.version.clone()) else {
        return failed("it was not asked");
    };
    let call = crate::median(turns.iter().map(|turn| turn.call_seconds).collect());
    let mut rows = Vec::new();
    for &codec in peer.codecs {
        let mut found = turns.iter().flat_map(|turn| &turn.codecs).filter(|timed| timed.codec == codec);
        let Some(mut all) = found.next().cloned() else {
            return failed(&format!("measure.py has no row {codec:?}"));
        };
        for turn in found {
            all.encode.extend(&turn.encode);
            all.decode.extend(&turn.decode);
            all.read.extend(&turn.read);
        }
        if all.encode.is_empty() || all.decode.is_empty() || all.read.is_empty() {
            return failed(&format!("measure.py has no times of {codec:?}"));
        }
        let outcome = Outcome::Measured(Measured::new(&all, bytes, memcpy, Some(call)));
        rows.push(Row { codec: codec.to_owned(), version: Some(version.clone()), outcome });
    }
    rows
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use lamina_codec::BLOCK_BYTES;

    use super::*;

    const MEMCPY: Copying = Copying { encode: 8e9, decode: 4e9 };

    fn timed(codec: &str, seconds: &[f64]) -> Timed {
        let samples = seconds.to_vec();
        Timed {
            codec: codec.to_owned(),
            stored_bytes: 4000,
            unit_bytes: 4096,
            encode: samples.clone(),
            decode: samples.clone(),
            read: samples,
        }
    }

    fn answer(call_seconds: f64, codecs: Vec<Timed>) -> Answer {
        Answer::Measured(PeerTimed { version: "some 1".to_owned(), call_seconds, codecs })
    }

    #[test]
    fn turns_are_merged_to_medians_of_all_samples() {
        let peer = &PEERS[2];
        let turn =
            |seconds: &[f64]| answer(seconds[0], peer.codecs.iter().map(|c| timed(c, seconds)).collect());
        let answers = vec![turn(&[1e-6, 2e-6]), turn(&[9e-6, 8e-6]), turn(&[4e-6])];
        let rows = rows(peer, answers, 8000, MEMCPY);
        assert_eq!(rows.iter().map(|row| row.codec.as_str()).collect::<Vec<_>>(), peer.codecs);
        for row in &rows {
            assert_eq!(row.version.as_deref(), Some("some 1"));
            let Outcome::Measured(measured) = &row.outcome else { panic!("{row:?}") };
            let close =
                |got: f64, wanted: f64| assert!((got - wanted).abs() < wanted * 1e-9, "{got} {wanted}");
            close(measured.ratio.unwrap(), 2.0);
            close(measured.encode_gbs, 2.0);
            close(measured.decode_gbs, 2.0);
            close(measured.encode_of_memcpy, 0.25);
            close(measured.decode_of_memcpy, 0.5);
            close(measured.read_us, 4.0);
            close(measured.call_us.unwrap(), 4.0);
        }
    }

    #[test]
    fn a_peer_without_numbers_keeps_its_rows_with_the_reason() {
        let peer = &PEERS[1];
        let why = "PyPI is not reachable".to_owned();
        let rows_ = rows(peer, vec![Answer::NotInstalled { why: why.clone() }], 4096, MEMCPY);
        assert_eq!(rows_.iter().map(|row| row.codec.as_str()).collect::<Vec<_>>(), peer.codecs);
        assert!(rows_.iter().all(|row| row.outcome == Outcome::NotInstalled { why: why.clone() }));
        let other = Answer::NotApplicable { why: "no int8".to_owned() };
        let outcome = |answers| rows(peer, answers, 4096, MEMCPY)[1].outcome.clone();
        assert_eq!(outcome(vec![other]), Outcome::NotApplicable { why: "no int8".to_owned() });
        let good = answer(0.0, peer.codecs.iter().map(|codec| timed(codec, &[1.0])).collect());
        let bad = Answer::Failed { why: "it ended".to_owned() };
        assert_eq!(outcome(vec![good, bad]), Outcome::Failed { why: "it ended".to_owned() });
        for answers in [
            Vec::new(),
            vec![answer(0.0, Vec::new())],
            vec![answer(0.0, peer.codecs.iter().map(|codec| timed(codec, &[])).collect())],
        ] {
            assert!(matches!(outcome(answers), Outcome::Failed { .. }));
        }
    }

    #[test]
    fn what_is_no_answer_fails_with_what_was_said() {
        let say = |script: &str| match ask(Command::new("sh").args(["-c", script])) {
            Answer::Failed { why } => why,
            other => panic!("{other:?}"),
        };
        assert!(say("echo first >&2; echo the last word >&2; exit 3").contains("the last word"));
        assert!(say("kill -SEGV $$").contains("signal"));
        assert!(say("echo no JSON").contains("answer"));
        let Answer::Failed { why } = ask(&mut Command::new("/no/such/python")) else { panic!() };
        assert!(why.contains("/no/such/python"), "{why}");
    }

    /// `measure.py PEER FORMAT` on `bytes`, by a Python without packages but those in `modules`;
    /// `None` where there is no Python.
    fn python(peer: &str, format: &str, bytes: &[u8], modules: &[(&str, &str)]) -> Option<Answer> {
        if Command::new("python3").arg("--version").output().is_err() {
            eprintln!("no python3 here: measure.py is not tested");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in modules {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let file = folder.path().join("bytes");
        fs::write(&file, bytes).unwrap();
        let program = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("peers/measure.py");
        let mut command = Command::new("python3");
        // -S: none of the packages that are installed here.
        command.arg("-S").arg(program).args([peer, format]).arg(file).arg("0");
        Some(ask(command.env("PYTHONPATH", folder.path()).env("PYTHONDONTWRITEBYTECODE", "1")))
    }

    /// Stands in for ZipNN's core: stores bytes backwards, and spoils its input as that does.
    const BACKWARDS: &str = "
def zipnn_core(header, data, *_):
    stored = header + bytes(reversed(data))
    data[:] = bytes(len(data))
    return stored
def combine_dtype(stored, buffers, bits, order, chunk, length, threads):
    assert len(stored) == length and threads == 1
    return bytes(reversed(stored))
";

    fn some_bytes() -> Vec<u8> {
        (0..80 * BLOCK_BYTES).map(|index| ((index * index) >> 7).to_le_bytes()[0]).collect()
    }

    #[test]
    fn measure_py_says_which_module_is_missing() {
        for peer in &PEERS {
            let Some(answer) = python(peer.name, "bf16", &some_bytes(), &[]) else { return };
            let Answer::NotInstalled { why } = answer else { panic!("{}: {answer:?}", peer.name) };
            assert!(why.contains("No module named"), "{why}");
        }
    }

    #[test]
    fn measure_py_measures_a_peer_and_has_the_row_that_is_expected() {
        let bytes = some_bytes();
        let Some(answer) = python("zipnn", "bf16", &bytes, &[("zipnn_core.py", BACKWARDS)]) else { return };
        let Answer::Measured(timed) = answer else { panic!("{answer:?}") };
        assert_eq!(timed.version, "zipnn unknown");
        assert!(timed.call_seconds > 0.0);
        let [codec] = timed.codecs.as_slice() else { panic!("{timed:?}") };
        assert_eq!([codec.codec.as_str()], PEERS[0].codecs);
        assert_eq!((codec.stored_bytes, codec.unit_bytes), (bytes.len() as u64 + 32, 256 << 10));
        assert_eq!([codec.encode.len(), codec.decode.len(), codec.read.len()], [1, 1, 1]);
    }

    #[test]
    fn measure_py_does_not_time_what_is_wrong() {
        let lies = BACKWARDS.replace("return bytes(reversed(stored))", "return bytes(length)");
        let Some(answer) = python("zipnn", "bf16", &some_bytes(), &[("zipnn_core.py", &lies)]) else {
            return;
        };
        let Answer::Failed { why } = answer else { panic!("{answer:?}") };
        assert!(why.contains("other bytes"), "{why}");
        let raises =
            BACKWARDS.replace("assert len(stored) == length and threads == 1", "raise OSError('broken')");
        let answer = python("zipnn", "bf16", &some_bytes(), &[("zipnn_core.py", &raises)]);
        assert_eq!(answer, Some(Answer::Failed { why: "OSError: broken".to_owned() }));
        let answer = python("zipnn", "int8", &some_bytes(), &[("zipnn_core.py", BACKWARDS)]);
        assert_eq!(answer, Some(Answer::NotApplicable { why: "ZipNN has no int8".to_owned() }));
        let answer = python("zipnn", "bf16", &[1; 4097], &[("zipnn_core.py", BACKWARDS)]);
        assert!(matches!(answer, Some(Answer::Failed { why }) if why.contains("4097")));
    }
}
