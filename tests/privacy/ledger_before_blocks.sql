BEGIN TRANSACTION;
CREATE TABLE epsilonflow_ledger (
	seq INTEGER NOT NULL, 
	kind TEXT NOT NULL CHECK (kind IN ('population', 'cap', 'reserve', 'settle', 'forfeit')), 
	population TEXT NOT NULL, 
	block TEXT DEFAULT 'all' NOT NULL, 
	run_id TEXT, 
	epsilon DOUBLE, 
	delta DOUBLE NOT NULL, 
	events TEXT NOT NULL, 
	about TEXT NOT NULL, 
	written_at TEXT NOT NULL, 
	previous_hash TEXT NOT NULL, 
	hash TEXT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (run_id, kind, block), 
	CHECK ((run_id IS NULL) = (kind IN ('population', 'cap'))), 
	UNIQUE (previous_hash), 
	UNIQUE (hash)
);
INSERT INTO "epsilonflow_ledger" VALUES(1,'population','patients','all',NULL,3.0,0.0001,'[]','{"public":false}','2026-11-21T19:43:21.000142+00:00','0000000000000000000000000000000000000000000000000000000000000000','30de09ca2b2b9bde3096c86381bdfd6ed520768e7bee94867e5998272d233c1f');
INSERT INTO "epsilonflow_ledger" VALUES(2,'population','digits','all',NULL,10.0,0.001,'[]','{"public":true}','2026-11-21T19:43:21.006201+00:00','30de09ca2b2b9bde3096c86381bdfd6ed520768e7bee94867e5998272d233c1f','942f7157cb7c566b93fad1bc8927cdf5481ee0c1208dde686c164dfc445331a8');
INSERT INTO "epsilonflow_ledger" VALUES(3,'reserve','patients','all','a',1.0,1.0e-05,'[{"count":3,"event":{"noise_multiplier":1.1,"type":"GaussianDpEvent"}}]','{"algorithm":"dp_sgd","price":"0"}','2026-11-21T19:43:21.011588+00:00','942f7157cb7c566b93fad1bc8927cdf5481ee0c1208dde686c164dfc445331a8','12f768d41085a11ad8d1ec1c35288c3129b69a76e00e0d3b8b185f679b1bca31');
INSERT INTO "epsilonflow_ledger" VALUES(4,'settle','patients','all','a',0.75,1.0e-05,'[{"count":3,"event":{"noise_multiplier":1.1,"type":"GaussianDpEvent"}}]','{}','2026-11-21T19:43:21.017745+00:00','12f768d41085a11ad8d1ec1c35288c3129b69a76e00e0d3b8b185f679b1bca31','e36adc2e1b2eedf99e2d220193967c5f710affb64108587e58513c25aff1f02b');
INSERT INTO "epsilonflow_ledger" VALUES(5,'reserve','patients','all','b',0.5,2.0e-05,'[{"count":3,"event":{"noise_multiplier":1.1,"type":"GaussianDpEvent"}}]','{"algorithm":"dp_sgd"}','2026-11-21T19:43:21.023236+00:00','e36adc2e1b2eedf99e2d220193967c5f710affb64108587e58513c25aff1f02b','d88c511d0cf5aed91f31cbd1e062a2ee7cbd8317bff3914e944aa6a9fe780a9a');
INSERT INTO "epsilonflow_ledger" VALUES(6,'forfeit','patients','all','b',0.5,2.0e-05,'[]','{}','2026-11-21T19:43:21.028494+00:00','d88c511d0cf5aed91f31cbd1e062a2ee7cbd8317bff3914e944aa6a9fe780a9a','4cbb96fde83a91cb4a7849520deeec13be97c3bf43d2ccf8389e2e6df35e1311');
INSERT INTO "epsilonflow_ledger" VALUES(7,'reserve','patients','all','c',0.25,1.0e-05,'[]','{}','2026-11-21T19:43:21.034419+00:00','4cbb96fde83a91cb4a7849520deeec13be97c3bf43d2ccf8389e2e6df35e1311','83b894cfe77d546514b626ef4a0c7da7ca0cb8d6500d490d6c4a743002d19020');
INSERT INTO "epsilonflow_ledger" VALUES(8,'cap','patients','all',NULL,2.0,0.0001,'[]','{}','2026-11-21T19:43:21.036943+00:00','83b894cfe77d546514b626ef4a0c7da7ca0cb8d6500d490d6c4a743002d19020','a717fb2509ad763ab8027943bbaebe0600fed59814612a1d5f679fa478fcb3ce');
INSERT INTO "epsilonflow_ledger" VALUES(9,'reserve','digits','all','free',NULL,1.0,'[]','{}','2026-11-21T19:43:21.039448+00:00','a717fb2509ad763ab8027943bbaebe0600fed59814612a1d5f679fa478fcb3ce','314c0209842e3aafde7630ab2b461f8aead7ee23269278524671f524b4b07173');
INSERT INTO "epsilonflow_ledger" VALUES(10,'settle','digits','all','free',NULL,1.0,'[]','{}','2026-11-21T19:43:21.041861+00:00','314c0209842e3aafde7630ab2b461f8aead7ee23269278524671f524b4b07173','32cad9afe3621938a9ec812bc744f417a646de436d4185627eb771297b0e62bc');
CREATE TRIGGER epsilonflow_ledger_no_update BEFORE UPDATE ON epsilonflow_ledger BEGIN SELECT RAISE(ABORT, 'the rows of the ledger are never changed or removed'); END;
CREATE TRIGGER epsilonflow_ledger_no_delete BEFORE DELETE ON epsilonflow_ledger BEGIN SELECT RAISE(ABORT, 'the rows of the ledger are never changed or removed'); END;
CREATE TRIGGER epsilonflow_ledger_no_replace BEFORE INSERT ON epsilonflow_ledger WHEN NEW.seq <= (SELECT max(seq) FROM epsilonflow_ledger) BEGIN SELECT RAISE(ABORT, 'the rows of the ledger are never changed or removed'); END;
COMMIT;
